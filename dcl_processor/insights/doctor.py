"""Examines what processors need of their databases, tables and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.db.models import Model

from dcl_processor.database.contention import is_database_error
from dcl_processor.database.time_limit import reading
from dcl_processor.diagnosis import describe, explain, one_line
from dcl_processor.processor import BatchProcessor

from . import processor_findings, session_findings, table_findings
from .findings import Finding, Level, has_ledger
from .statements import Asked
from .status import TIMEOUT

#: By name, what is found out about each database, and which databases can tell.
_SESSIONS: dict[str, tuple[Callable[[str, Sequence[Asked]], Iterator[Finding]], frozenset[str]]] = {
    "read-only": (session_findings.writable, frozenset({"postgresql", "mysql", "sqlite"})),
    "isolation": (session_findings.isolation, frozenset({"postgresql", "mysql"})),
    "snapshot": (session_findings.snapshots, frozenset({"postgresql"})),
    "lost-host": (session_findings.lost_hosts, frozenset({"postgresql"})),
    "idle-in-transaction": (session_findings.idle_transactions, frozenset({"postgresql"})),
}

#: The findings about tables, which only PostgreSQL has figures for.
_OF_TABLES = ("autovacuum", "flag-index", "pending")


def examine(
    processors: Sequence[BatchProcessor[Any]],
    among: Sequence[BatchProcessor[Any]],
    *,
    using: str | None = None,
    seconds: float = TIMEOUT,
) -> Iterator[Finding]:
    """Yield the findings about these processors, and about the databases and tables they use.

    ``among``: all processors, which may share columns with these. ``seconds``: the time limit of
    each question to a database. Raises no error of a database or of a user's code: what could not
    be found out is a finding, too.
    """
    asked: list[Asked] = []
    for processor in processors:
        try:
            asked.append(Asked.of(processor, using))
        except Exception as error:  # noqa: BLE001  # the reason is the finding
            yield _broken(processor, error, using)
    for alias in dict.fromkeys(each.question.using for each in asked):
        here = [each for each in asked if each.question.using == alias]
        yield from _of_database(alias, here, seconds)
    for each in asked:
        yield from processor_findings.routing(each)
        yield from _of_lease(each, seconds)
    yield from processor_findings.sharing_columns(asked, [*asked, *_others(asked, among, using)])


def _of_lease(asked: Asked, seconds: float) -> Iterator[Finding]:
    """Find whether the lease is long enough, in the database of the ledger if there is one."""
    findings = processor_findings.lease_times(asked)
    if asked.processor.lease is None or not has_ledger():
        yield from findings
        return
    from dcl_processor.ledger.tables import alias  # has models

    yield from _Search(alias(), seconds).found("lease", asked.processor.name, findings)


def _others(
    asked: Sequence[Asked], among: Sequence[BatchProcessor[Any]], using: str | None
) -> Iterator[Asked]:
    known = {each.processor.name for each in asked}
    for processor in among:
        if processor.name not in known:
            try:
                yield Asked.of(processor, using)
            except Exception:  # noqa: BLE001, S112  # examined when it is asked for itself
                continue


def _broken(processor: BatchProcessor[Any], error: Exception, using: str | None) -> Finding:
    level = Level.UNKNOWN if is_database_error(error) else Level.PROBLEM
    what = explain(error, processor, using).rstrip(".")
    return Finding(level, "options", processor.name, what, "It cannot run", "manage.py check")


def _of_database(using: str, asked: Sequence[Asked], seconds: float) -> Iterator[Finding]:
    yield from session_findings.requests(using, asked)
    try:
        connections[using].ensure_connection()
    except Exception as error:  # noqa: BLE001  # whatever a driver raises
        yield _unknown("connection", session_findings.about(using), error)
        return
    vendor = connections[using].vendor
    if vendor == "postgresql":
        yield from _pooling(using)
    search = _Search(using, seconds)
    for check, (find, vendors) in _SESSIONS.items():
        if vendor in vendors:
            yield from search.found(check, session_findings.about(using), find(using, asked))
    if vendor == "postgresql":
        yield from _of_tables(using, asked, search)
    for each in asked:
        held = processor_findings.held_keys(each)
        yield from search.found("held-key", each.processor.name, held)
    left_out = [check for check, (_, vendors) in _SESSIONS.items() if vendor not in vendors]
    left_out += [] if vendor == "postgresql" else _OF_TABLES
    if left_out:
        yield Finding(
            Level.LEFT_OUT,
            "database",
            session_findings.about(using),
            f"{', '.join(left_out)}: {connections[using].display_name} is not asked for them",
        )


def _pooling(using: str) -> Iterator[Finding]:
    """Find a pooler; outside the transaction that limits the time of the other questions."""
    try:
        yield from session_findings.pooling(using)
    except Exception as error:  # noqa: BLE001  # for instance no room for a second connection
        yield _unknown("pooler", session_findings.about(using), error)


@dataclass(frozen=True, slots=True)
class _Search:
    """Asks one database; each of its questions may take so many seconds."""

    using: str
    seconds: float

    def found(self, check: str, about: str, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Yield the findings; an error, of the database or of any code, is one as well."""
        try:
            with reading(self.using, self.seconds):
                found = list(findings)
        except Exception as error:  # noqa: BLE001  # the other findings are still to be found
            found = [_unknown(check, about, error)]
        yield from found


def _of_tables(using: str, asked: Sequence[Asked], search: _Search) -> Iterator[Finding]:
    users: dict[type[Model], list[Asked]] = {}
    for each in asked:
        users.setdefault(each.question.model, []).append(each)
    for model, theirs in users.items():
        where = f"table {model._meta.db_table}"
        yield from search.found("autovacuum", where, table_findings.autovacuum(using, model))
        yield from search.found("flag-index", where, table_findings.needless_indexes(using, theirs))
        for each in theirs:
            found = table_findings.pending_share(using, each)
            yield from search.found("pending", each.processor.name, found)


def _unknown(check: str, about: str, error: Exception) -> Finding:
    said = f"the database answered: {one_line(error)}"
    what = (said if is_database_error(error) else describe(error)).rstrip(".")
    return Finding(Level.UNKNOWN, check, about, what)
