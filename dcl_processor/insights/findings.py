"""Findings about a database, the sessions that a project has with it, and its processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.db import connections, router

from dcl_processor.definition.groups import groups_of
from dcl_processor.definition.kinds import rules_of
from dcl_processor.masking import shown
from dcl_processor.operator_states import default_age

from . import catalog, rows
from .answer import Finding, as_utc, ok, problem, unknown, warning
from .rows import key_text
from .statements import Asked

#: Seconds after which a snapshot is old, and transactions after which one of unknown age may be.
OLD_SNAPSHOT, MANY_TRANSACTIONS = 300.0, 1_000

#: Characters of a key, or of a primary key, that are shown.
_LONGEST = 80


def writable(using: str) -> Iterator[Finding]:
    """Find whether rows can be locked here: a replica locks none."""
    match connections[using].vendor:
        case "postgresql":
            sql = "SELECT current_setting('transaction_read_only')"
        case "mysql":
            # The server may be read-only, and so may be the session's transactions.
            sql = (
                "SHOW SESSION VARIABLES WHERE Variable_name IN "
                "('read_only', 'tx_read_only', 'transaction_read_only')"
            )
        case _:
            sql = "PRAGMA query_only"
    if all(value in ("off", "OFF", 0) for *_, value in catalog.rows(using, sql)):
        yield ok("rows can be locked and written")
        return
    yield problem(
        "the database accepts no writes: it is a replica, or its sessions are read-only",
        "No row can be locked, so no row is handled",
        "Give the processors the primary's alias with using=, or correct the router's "
        "db_for_write()",
    )


def snapshots(using: str) -> Iterator[Finding]:
    """Find what keeps dead rows, and dead entries of the pending index, from being removed."""
    is_clean = True
    for each in catalog.snapshots(using):
        named = f" ({each.application_name})" if each.application_name else ""
        if each.seconds is not None:
            is_old = each.seconds >= OLD_SNAPSHOT
            since = f"has been open for {each.seconds:.0f} s"
        else:
            is_old = each.transactions >= MANY_TRANSACTIONS
            since = f"is {each.transactions} transactions old"
        if not is_old:
            continue
        is_clean = False
        if each.seconds is None and each.kind == "session":
            yield unknown(
                f"since when the session {each.name} of the role {each.role} has been open, which "
                f"{since}",
                "PostgreSQL hides the time of another role's transaction",
                "GRANT pg_read_all_stats to the role of this database",
            )
            continue
        yield warning(
            f"the {each.kind} {each.name}{named} {since}",
            "Vacuum removes no row that was flipped since, and each lock-free read passes all "
            "their index entries",
            "End it (pg_terminate_backend, pg_drop_replication_slot, ROLLBACK PREPARED); let slow "
            "handlers work outside the transaction with AT_LEAST_ONCE",
        )
    if is_clean:
        yield ok("no old snapshot keeps dead rows")


def idle_transactions(using: str, asked: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether a handler that hangs in its transaction keeps its row forever."""
    inside = [each.processor.name for each in asked if rules_of(each.processor).in_transaction]
    name = "idle_in_transaction_session_timeout"
    milliseconds = float(catalog.settings(using, name)[name])
    if not inside:
        yield ok("no handler works inside a transaction")
    elif milliseconds > 0:
        yield ok(f"{name} is {milliseconds / 1000:g} s")
    else:
        yield warning(
            f"{name} is not set, and the handlers of {', '.join(inside)} work inside a transaction",
            "A handler that hangs keeps its row, its connection and vacuum's horizon forever",
            f"ALTER ROLE … SET {name} = '5min', or three times the longest handler",
        )


def routing(asked: Asked) -> Iterator[Finding]:
    """Find whether handlers read from another database than the one that has the locks."""
    question = asked.question
    reads = router.db_for_read(question.model)
    if reads == question.using:
        yield ok(f"rows are locked, and read by handlers, on {reads!r}")
        return
    yield warning(
        f"rows of {question.model._meta.label} are locked on {question.using!r}, and what handlers "
        f"read goes to {reads!r}",
        "The lock protects nothing that is read elsewhere: a replica may show a handler values "
        "from before the lock, also those that its last row has written",
        f"Let db_for_read() return {question.using!r} while a handler works, or read with "
        f".using({question.using!r})",
    )


def held_keys(asked: Asked) -> Iterator[Finding]:
    """Find the oldest row in doubt that holds its key."""
    processor, at = asked.processor, asked.processor.claimed_at
    if processor.group_by is None or at is None or processor.lease is not None:
        return
    groups = groups_of(processor, asked.question.model)
    found = rows.in_doubt(processor, asked.question, default_age(processor))
    assert found is not None
    oldest = found.filter(**{f"{groups.column}__isnull": False}).order_by(at)
    for pk, key, since in oldest.values_list("pk", groups.column, at)[:1]:
        row = shown(key_text(pk), _LONGEST)
        place = "no other row of the key is handled"
        if (groups.most or 1) > 1:
            place = f"one of the {groups.most} places of the key is taken"
        yield problem(
            f"key {shown(str(key), _LONGEST)} is held by row {row}, in doubt since "
            f"{as_utc(since):%Y-%m-%d %H:%M:%S} UTC",
            f"Until a person decides, {place}",
            f"manage.py processors show {processor.name} {row}, and then requeue or mark-done",
        )
        return
    yield ok("no row holds its key until a person decides")
