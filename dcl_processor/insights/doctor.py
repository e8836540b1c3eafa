"""Examines what processors need of their databases, tables and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from django.db import DatabaseError, connections, router, transaction
from django.db.models import BooleanField, F, Model, Value

from dcl_processor.definition.groups import groups_of
from dcl_processor.operator.diagnosis import describe, explain, one_line
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.times import utc_text
from dcl_processor.options.kinds import rules_of
from dcl_processor.options.model_columns import own_columns, written_columns
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import shown
from dcl_processor.sql.errors import is_database_error, refuses_constant, unwritable

from . import catalog, rows
from .answer import TIMEOUT, Finding, Level, ok, problem, unknown, warning
from .explanation import Asked
from .pending_index import suggested

#: What only PostgreSQL has figures for.
_OF_POSTGRESQL = "snapshot, idle-in-transaction, autovacuum, flag-index"

#: Seconds after which a snapshot is old, and transactions after which one of unknown age may be.
OLD_SNAPSHOT, MANY_TRANSACTIONS = 300.0, 1_000

#: Characters of a key, or of a primary key, that are shown.
_LONGEST = 80


def examine(
    processors: Sequence[BatchProcessor[Any]], *, using: str | None = None, seconds: float = TIMEOUT
) -> Iterator[Finding]:
    """Yield the findings about these processors, and about the databases and tables they use.

    ``seconds``: the time limit of each question to a database. Raises no error of a database or of
    a user's code: what could not be found out is a finding, too.
    """
    asked: list[Asked] = []
    for processor in processors:
        try:
            asked.append(Asked.of(processor, using))
        except Exception as error:  # noqa: BLE001  # the reason is the finding
            level = unknown if is_database_error(error) else problem
            what = explain(error, processor, using).rstrip(".")
            found = level(what, "It cannot run", "manage.py check")
            yield replace(found, check="options", about=processor.name)
    for alias in dict.fromkeys(each.question.using for each in asked):
        here = [each for each in asked if each.question.using == alias]
        yield from _of_database(alias, here, seconds)


def _of_database(using: str, asked: Sequence[Asked], seconds: float) -> Iterator[Finding]:
    about, limit, connection = f"database {using!r}", (using, seconds), connections[using]
    try:
        connection.ensure_connection()
    except Exception as error:  # noqa: BLE001  # whatever a driver raises
        yield replace(_failed(error), check="connection", about=about)
        return
    for each in asked:
        yield from _found("write", each.processor.name, writable(each), limit)
        yield from _found("router", each.processor.name, routing(each), limit)
        yield from _found("held-key", each.processor.name, held_keys(each), limit)
    if connection.vendor != "postgresql":
        what = f"{_OF_POSTGRESQL}: {connection.display_name} is not asked for them"
        yield Finding(Level.LEFT_OUT, what, check="database", about=about)
        return
    yield from _found("snapshot", about, snapshots(using), limit)
    idle = idle_transactions(using, asked)
    yield from _found("idle-in-transaction", about, idle, limit)
    for model in dict.fromkeys(each.question.model for each in asked):
        table = f"table {model._meta.db_table} of {about}"
        users = [each for each in asked if each.question.model is model]
        yield from _found("autovacuum", table, autovacuum(using, model), limit)
        needless = needless_indexes(using, users)
        yield from _found("flag-index", table, needless, limit)


def _found(
    check: str, about: str, found: Iterable[Finding], limit: tuple[str, float]
) -> list[Finding]:
    """Return the findings; an error, of the database or of any code, is one as well.

    ``limit``: the database that is asked, and the seconds that each question may take.
    """
    try:
        with reading(*limit):
            done = list(found)
    except Exception as error:  # noqa: BLE001  # the other findings are still to be found
        done = [_failed(error)]
    return [replace(each, check=check, about=about) for each in done]


def _failed(error: Exception) -> Finding:
    said = f"the database answered: {one_line(error)}"
    return unknown((said if is_database_error(error) else describe(error)).rstrip("."))


# --- the findings about a database, its sessions, and its processors


def writable(asked: Asked) -> Iterator[Finding]:
    """Find whether the columns that are known to be written can be; no row is written to."""
    question = asked.question
    names = written_columns(asked.processor, question.model)
    if not names:
        return  # those of a function are known when it is called
    columns = " and ".join(names)
    no_row = question.table.filter(Value(False, output_field=BooleanField()))
    try:
        with transaction.atomic(using=question.using):
            no_row.update(**{name: F(name) for name in names})
    except DatabaseError as error:
        if not (refuses_constant(error) or unwritable(error, question.using)):
            raise
        yield problem(
            f"{columns} cannot be written: {one_line(error).rstrip('.')}",
            "No row can be settled after its handler was called",
            "GRANT UPDATE on the columns, give the primary's alias with using=, or correct the "
            "router's db_for_write()",
        )
    else:
        yield ok(f"{columns} can be written")


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
    found = rows.in_state("in_doubt", processor, asked.question)
    oldest = found.filter(**{f"{groups.column}__isnull": False}).order_by(at)
    for pk, key, since in oldest.values_list("pk", groups.column, at)[:1]:
        row = shown(rows.key_text(pk), _LONGEST)
        place = "no other row of the key is handled"
        if (groups.most or 1) > 1:
            place = f"one of the {groups.most} places of the key is taken"
        yield problem(
            f"key {shown(str(key), _LONGEST)} is held by row {row}, in doubt since "
            f"{utc_text(since)}",
            f"Until a person decides, {place}",
            f"manage.py processors show {processor.name} {row}, and then requeue or mark-done",
        )
        return
    yield ok("no row holds its key until a person decides")


# --- the table of one model, as PostgreSQL's statistics show it


def autovacuum(using: str, model: type[Model]) -> Iterator[Finding]:
    """Find whether dead rows are removed from the table at all."""
    table = catalog.table(using, model)
    settings = catalog.settings(using, "autovacuum", "track_counts")
    off = ("false", "off", "0", "no")
    if "off" not in settings.values() and table.options.get("autovacuum_enabled") not in off:
        yield ok(f"autovacuum is on for the table, which has {table.dead} dead rows")
        return
    yield warning(
        f"autovacuum is off for the table, which has {table.dead} dead rows",
        "Every flip leaves a dead row and a dead entry in the pending index, and each lock-free "
        "read passes them",
        "Set autovacuum_enabled = true for the table, or autovacuum and track_counts = on for the "
        "server, and VACUUM the table",
    )


def needless_indexes(using: str, asked: Sequence[Asked]) -> Iterator[Finding]:
    """Find indexes that each row's flip, claim or lease has to write to; of one table's users."""
    model = asked[0].question.model
    written = {column for each in asked for column in _written(each)}
    written -= {column for each in asked for column in _read_by(each)}
    table, is_clean = catalog.table(using, model), True
    for index in catalog.indexes(using, model):
        columns = sorted(written & {*index.columns})
        # The condition of a partial index needs the flag, and a unique index is a constraint.
        if not index.is_partial and not index.is_unique and columns:
            is_clean = False
            used = f", used {index.scans} times since the statistics began"
            yield warning(
                f"the index {index.name} holds {' and '.join(columns)}"
                f"{'' if index.scans is None else used}",
                "Each flip writes to it, and to every other index of the table, because PostgreSQL "
                f"cannot update the row in place ({table.hot} of {table.updates} updates were)",
                "If no other query needs it, drop it (db_index, Meta.indexes), and let a partial "
                "index of the pending rows serve the read: manage.py processors explain",
            )
    if is_clean:
        yield ok("no plain index holds a column that is written for each row")


def _written(asked: Asked) -> Iterator[str]:
    """Yield the columns of the model's own table that are written for each row."""
    processor, meta = asked.processor, asked.question.model._meta
    for name in (*(processor.done or ()), *(processor.claim or ()), *own_columns(processor)):
        field: Any = meta.get_field(name)
        # The index of a foreign key is for deletions of the row that it points to.
        if field in meta.local_concrete_fields and not field.is_relation:
            yield field.column


def _read_by(asked: Asked) -> Iterator[str]:
    """Yield the columns by which the index of the pending rows finds them."""
    index = suggested(asked.processor, asked.question).read
    for name in [] if index is None else index.fields:
        field: Any = asked.question.model._meta.get_field(name.lstrip("-"))
        yield field.column
