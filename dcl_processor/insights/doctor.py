"""Examines what processors need of their databases and options: six checks, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, cast

from django.db import DatabaseError, connections, router
from django.db.models import BooleanField, F, Value

from dcl_processor.engine.trial import dry_run
from dcl_processor.insights.answer import TIMEOUT, connect
from dcl_processor.insights.explanation import asked
from dcl_processor.operator.diagnosis import describe, explain
from dcl_processor.operator.times import reading
from dcl_processor.options.model_columns import written_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending import scan
from dcl_processor.pending.question import Question
from dcl_processor.report.errors import shown
from dcl_processor.report.exceptions import ProcessorError
from dcl_processor.report.report import MOST_COUNTED
from dcl_processor.sql.errors import is_passing

#: Seconds after which a transaction is old.
OLD = 300.0

#: Characters of a primary key that are shown.
_LONGEST = 80

# A snapshot keeps dead rows of its database from being removed, and so does a transaction that has
# an id, such as that of a locked row. Those of other roles show their age with pg_read_all_stats.
_OLD_TRANSACTIONS = """
SELECT pid, application_name, usename, extract(epoch FROM clock_timestamp() - xact_start)::float
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND datname = current_database()
    AND pid <> pg_backend_pid() AND clock_timestamp() - xact_start >= make_interval(secs => %s)
ORDER BY xact_start
"""

_IDLE_TIMEOUT = "idle_in_transaction_session_timeout"


class Level(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    #: It costs time, or loses something when something else fails.
    WARNING = "warning"
    #: Rows are not handled, or are handled wrongly.
    PROBLEM = "problem"
    #: Not now, or not by this role.
    UNKNOWN = "could not be found out"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``what`` is found, ``why`` it matters, and what to do to ``fix`` it.

    These are sentences without a period; the last two are empty if nothing is to be done.
    ``check``: its short name; ``about``: the database or the processor. The doctor adds them.
    """

    level: Level
    what: str
    why: str = ""
    fix: str = ""
    about: str = ""
    check: str = ""

    def __str__(self) -> str:
        sentences = [each for each in (self.what, self.why, self.fix) if each]
        return f"{self.level}: {self.check}, {self.about}: {'. '.join(sentences)}."

    def as_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        return {**asdict(self), "level": self.level.name.lower()}


ok, warning, problem = (partial(Finding, each) for each in [*Level][:3])

#: A processor and its question.
Asked = tuple[Definition[Any], Question[Any]]


def examine(
    processors: Sequence[Definition[Any]], *, using: str | None = None, seconds: float = TIMEOUT
) -> Iterator[Finding]:
    """Yield the findings about these processors, and about the databases that they use.

    ``seconds``: the time limit of each question about rows. Raises no error of a database or of a
    user's code: what could not be found out is a finding, too.
    """
    databases: dict[str, list[Asked]] = {}
    for processor in processors:
        try:
            question = asked(processor, using)
        except Exception as error:  # noqa: BLE001  # the reason is the finding
            what = explain(error, processor, using).rstrip(".")
            found = problem(what, "It cannot run", "Correct the option; see manage.py check")
            yield replace(found, check="options", about=processor.name)
        else:
            databases.setdefault(question.using, []).append((processor, question))
    for alias, here in databases.items():
        yield from _of_database(alias, here, seconds)


def _of_database(using: str, here: Sequence[Asked], seconds: float) -> Iterator[Finding]:
    about = f"database {using!r}"
    if down := _found("connection", about, connection(using)):
        yield from down
        return
    for processor, question in here:
        yield from _found("flip", processor.name, flip(processor, question, seconds))
        yield from _found("router", processor.name, routing(question))
    if connections[using].vendor == "postgresql":
        yield from _found("snapshot", about, old_transactions(using))
        yield from _found("idle-in-transaction", about, idle_transactions(using, here))


def _found(check: str, about: str, found: Iterator[Finding]) -> list[Finding]:
    """Return the findings; an error, of the database or of any code, is one as well."""
    try:
        done = list(found)
    except Exception as error:  # noqa: BLE001  # the other findings are still to be found
        fix = "Repeat it with a longer --timeout, or look into the server's log"
        done = [Finding(Level.UNKNOWN, describe(error).rstrip("."), "", fix)]
    return [replace(each, check=check, about=about) for each in done]


# --- the processors


def flip(processor: Definition[Any], question: Question[Any], seconds: float) -> Iterator[Finding]:
    """Try the flip on a row, as a dry run does, and roll it back; and the right without a row."""
    names = written_columns(processor, question.model)  # those of a function are not known
    no_row = question.table.filter(Value(False, output_field=BooleanField()))
    tried = "no row was free to try the flip on, and its columns can be written"
    try:
        with reading(question.using, seconds):
            no_row.update(**{name: F(name) for name in names})
            scan.count(question, MOST_COUNTED)
        found = dry_run(processor, filter=None, using=question.using, limit=1)
        refused = found.refused.removeprefix(f"{processor.name}: ")
        if found.rehearsed is not None:
            tried = f"the flip takes row {shown(str(found.rehearsed), _LONGEST)} out of pending"
    except (DatabaseError, ProcessorError) as error:
        if is_passing(error):
            raise
        refused = explain(error, processor, question.using)
    if not refused:
        yield ok(tried)
        return
    yield problem(
        refused.rstrip("."),
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


# --- the server


def connection(using: str) -> Iterator[Finding]:
    """Find whether the database can be reached: nothing if it can."""
    connect(using)
    yield from ()


def old_transactions(using: str) -> Iterator[Finding]:
    """Find what keeps dead rows, and dead entries of the pending index, from being removed."""
    old = _rows(using, _OLD_TRANSACTIONS, [OLD])
    for pid, name, role, seconds in old:
        yield warning(
            shown(f"the transaction of session {pid}, {name}, role {role}, is {seconds:.0f} s old"),
            "Vacuum removes no row that was flipped since, and each lock-free read passes all "
            "their index entries",
            f"End it (SELECT pg_terminate_backend({pid})); let slow handlers work outside the "
            "transaction with AT_LEAST_ONCE",
        )
    if not old:
        yield ok("no old transaction keeps dead rows")


def idle_transactions(using: str, here: Sequence[Asked]) -> Iterator[Finding]:
    """Find whether a handler that hangs in its transaction keeps its row forever."""
    inside = [processor.name for processor, _ in here if processor.is_transactional]
    ((limit,),) = _rows(using, f"SHOW {_IDLE_TIMEOUT}")
    if not inside or limit != "0":
        yield ok(f"{_IDLE_TIMEOUT} is {limit}")
        return
    yield warning(
        f"{_IDLE_TIMEOUT} is not set, and the handlers of {', '.join(inside)} work inside a "
        "transaction",
        "A handler that hangs keeps its row, its connection and vacuum's horizon forever",
        f"ALTER ROLE … SET {_IDLE_TIMEOUT} = '5min', or three times the longest handler",
    )


def _rows(using: str, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return cast("list[tuple[Any, ...]]", cursor.fetchall())
