"""Examines what processors need of their databases, tables and options: seven checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from django.db import DatabaseError, connections, router, transaction
from django.db.models import BooleanField, F, Value

from dcl_processor.engine.trial import dry_run
from dcl_processor.insights import catalog, rows
from dcl_processor.insights.answer import TIMEOUT, Finding, ok, problem, unknown, warning
from dcl_processor.insights.explanation import asked
from dcl_processor.keys.columns import column_of
from dcl_processor.operator.diagnosis import describe, explain, one_line
from dcl_processor.operator.time_limit import reading
from dcl_processor.operator.times import utc_text
from dcl_processor.options.model_columns import written_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question
from dcl_processor.report.dry_run import MOST_COUNTED
from dcl_processor.report.errors import shown
from dcl_processor.report.exceptions import ProcessorError
from dcl_processor.sql.errors import is_database_error, is_passing

#: Seconds after which a snapshot is old, and transactions after which one of unknown age may be.
OLD_SNAPSHOT, MANY_TRANSACTIONS = 300.0, 1_000

#: Characters of a key, or of a primary key, that are shown.
_LONGEST = 80

#: A processor and its question.
Asked = tuple[Definition[Any], Question[Any]]


def examine(
    processors: Sequence[Definition[Any]], *, using: str | None = None, seconds: float = TIMEOUT
) -> Iterator[Finding]:
    """Yield the findings about these processors, and about the databases and tables they use.

    ``seconds``: the time limit of each question to a database. Raises no error of a database or of
    a user's code: what could not be found out is a finding, too.
    """
    databases: dict[str, list[Asked]] = {}
    for processor in processors:
        try:
            question = asked(processor, using)
            databases.setdefault(question.using, []).append((processor, question))
        except Exception as error:  # noqa: BLE001  # the reason is the finding
            level = unknown if is_database_error(error) else problem
            what = explain(error, processor, using).rstrip(".")
            found = level(what, "It cannot run", "Correct the option; see manage.py check")
            yield replace(found, check="options", about=processor.name)
    for alias, here in databases.items():
        yield from _of_database(alias, here, seconds)


def _of_database(using: str, here: Sequence[Asked], seconds: float) -> Iterator[Finding]:
    about, connection = f"database {using!r}", connections[using]
    found = partial(_found, using, seconds)
    try:
        connection.ensure_connection()
    except Exception as error:  # noqa: BLE001  # whatever a driver raises
        yield replace(_failed(error), check="connection", about=about)
        return
    for processor, question in here:
        name = processor.name
        flip = [*found("flip", name, writable(processor, question))]
        yield from flip or _tried(processor, using)
        yield from found("router", name, routing(question))
        yield from found("held-key", name, held_keys(processor, question))
    if connection.vendor != "postgresql":
        return
    yield from found("snapshot", about, snapshots(using))
    yield from found("idle-in-transaction", about, idle_transactions(using, here))


def _found(
    using: str, seconds: float, check: str, about: str, found: Iterable[Finding]
) -> list[Finding]:
    """Return the findings; an error, of the database or of any code, is one as well."""
    try:
        with reading(using, seconds):
            done = list(found)
    except Exception as error:  # noqa: BLE001  # the other findings are still to be found
        done = [_failed(error)]
    return [replace(each, check=check, about=about) for each in done]


def _failed(error: Exception) -> Finding:
    said = f"the database answered: {one_line(error)}" if is_database_error(error) else ""
    what = (said or describe(error)).rstrip(".")
    return unknown(what, "", "Repeat it with a longer --timeout, or look into the server's log")


# --- the processors


def writable(processor: Definition[Any], question: Question[Any]) -> Iterator[Finding]:
    """Find a right that is missing, without a row; raise if the question takes too long."""
    names = written_columns(processor, question.model)
    no_row = question.table.filter(Value(False, output_field=BooleanField()))
    try:
        with transaction.atomic(using=question.using):
            if names:  # those of a function are known when it is called
                no_row.update(**{name: F(name) for name in names})
    except DatabaseError as error:
        if is_passing(error):
            raise
        what = f"{' and '.join(names)} cannot be written: {one_line(error).rstrip('.')}"
        yield _refused(what)
    else:
        scan.count(question, MOST_COUNTED)


def _tried(processor: Definition[Any], using: str) -> Iterator[Finding]:
    """Try the flip on a row, as a dry run does, and roll it back."""
    about: dict[str, Any] = {"check": "flip", "about": processor.name}
    try:
        found = dry_run(processor, filter=None, using=using, limit=1)
    except ProcessorError as error:
        yield replace(_refused(explain(error, processor, using).rstrip(".")), **about)
    except Exception as error:  # noqa: BLE001  # the other findings are still to be found
        yield replace(_failed(error), **about)
    else:
        words = found.refused.removeprefix(f"{processor.name}: ").rstrip(".")
        tried = "no row was free to try the flip on, and its columns can be written"
        if found.rehearsed is not None:
            tried = f"the flip takes row {shown(str(found.rehearsed), _LONGEST)} out of pending"
        yield replace(_refused(words) if words else ok(tried), **about)


def _refused(what: str) -> Finding:
    return problem(
        what,
        "No row can be settled after its handler was called",
        "GRANT UPDATE on the columns, give the primary's alias with using=, or correct the values "
        "of the flip",
    )


def routing(question: Question[Any]) -> Iterator[Finding]:
    """Find whether handlers read from another database than the one that has the locks."""
    using, reads = question.using, router.db_for_read(question.model)
    if reads == using:
        yield ok(f"rows are locked, and read by handlers, on {reads!r}")
        return
    yield warning(
        f"rows of {question.model._meta.label} are locked on {using!r}, and what handlers read "
        f"goes to {reads!r}",
        "The lock protects nothing that is read elsewhere: a replica may show a handler values "
        "from before the lock, also those that its last row has written",
        f"Let db_for_read() return {using!r} while a handler works, or read with .using({using!r})",
    )


def held_keys(processor: Definition[Any], question: Question[Any]) -> Iterator[Finding]:
    """Find the oldest row in doubt that holds its key."""
    at = processor.claimed_at
    if processor.group_by is None or at is None or processor.lease is not None:
        return
    column = column_of(processor, "group_by", question.model)
    found = rows.in_state("in_doubt", processor, question)
    oldest = found.filter(**{f"{column}__isnull": False}).order_by(at)
    for pk, key, since in oldest.values_list("pk", column, at)[:1]:
        row, most = shown(rows.key_text(pk), _LONGEST), processor.most_of_a_key or 1
        place = "no other row of the key is handled"
        if most > 1:
            place = f"one of the {most} places of the key is taken"
        yield problem(
            f"key {shown(str(key), _LONGEST)} is held by row {row}, in doubt since "
            f"{utc_text(since)}",
            f"Until a person decides, {place}",
            f"manage.py processors show {processor.name} {row}, and then requeue or mark-done",
        )
        return
    yield ok("no row holds its key until a person decides")


# --- the server


def snapshots(using: str) -> Iterator[Finding]:
    """Find what keeps dead rows, and dead entries of the pending index, from being removed."""
    old = catalog.old_snapshots(using, OLD_SNAPSHOT, MANY_TRANSACTIONS)
    for kind, name, seconds, transactions in old:
        since = f"{transactions} transactions old"
        hidden = "; GRANT pg_read_all_stats to this role shows since when it is open"
        yield warning(
            shown(f"the {kind} {name} is {since if seconds is None else f'{seconds:.0f} s old'}"),
            "Vacuum removes no row that was flipped since, and each lock-free read passes all "
            "their index entries",
            "End it (pg_terminate_backend, pg_drop_replication_slot, ROLLBACK PREPARED); let slow "
            "handlers work outside the transaction with AT_LEAST_ONCE"
            + (hidden if seconds is None else ""),
        )
    if not old:
        yield ok("no old snapshot keeps dead rows")


def idle_transactions(using: str, here: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether a handler that hangs in its transaction keeps its row forever."""
    inside = [processor.name for processor, _ in here if processor.is_transactional]
    name = "idle_in_transaction_session_timeout"
    sql = "SELECT setting::float FROM pg_settings WHERE name = %s"
    ((milliseconds,),) = catalog.rows(using, sql, [name])
    if not inside or milliseconds > 0:
        yield ok(f"{name} is {milliseconds / 1000:g} s" if inside else "no handler is in one")
        return
    yield warning(
        f"{name} is not set, and the handlers of {', '.join(inside)} work inside a transaction",
        "A handler that hangs keeps its row, its connection and vacuum's horizon forever",
        f"ALTER ROLE … SET {name} = '5min', or three times the longest handler",
    )
