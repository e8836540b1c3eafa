"""Examines what processors need of their databases, tables and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from django.db import connections

from dcl_processor.database.contention import is_database_error
from dcl_processor.database.time_limit import reading
from dcl_processor.diagnosis import describe, explain, one_line
from dcl_processor.processor import BatchProcessor

from . import processor_findings, session_findings, table_findings
from .answer import Finding, Level, problem, unknown
from .statements import Asked
from .status import TIMEOUT, has_ledger

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
            level = unknown if is_database_error(error) else problem
            what = explain(error, processor, using).rstrip(".")
            found = level(what, "It cannot run", "manage.py check")
            yield replace(found, check="options", about=processor.name)
    for alias in dict.fromkeys(each.question.using for each in asked):
        here = [each for each in asked if each.question.using == alias]
        yield from _of_database(alias, here, seconds)
    for each in asked:
        name = each.processor.name
        yield from _found("router", name, processor_findings.routing(each))
        limit = (_ledger(), seconds) if each.processor.lease and has_ledger() else None
        yield from _found("lease", name, processor_findings.lease_times(each), limit)
    shared = processor_findings.sharing_columns(asked, [*asked, *_others(asked, among, using)])
    yield from _found("shared-columns", "", shared)


def _ledger() -> str:
    from dcl_processor.ledger.tables import alias  # has models

    return alias()


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


def _of_database(using: str, asked: Sequence[Asked], seconds: float) -> Iterator[Finding]:
    about, limit, connection = f"database {using!r}", (using, seconds), connections[using]
    yield from _found("atomic-requests", about, session_findings.requests(using))
    try:
        connection.ensure_connection()
    except Exception as error:  # noqa: BLE001  # whatever a driver raises
        yield replace(_failed(error), check="connection", about=about)
        return
    left_out: list[str] = []
    if connection.vendor == "postgresql":
        # Outside the transaction that limits the time of the other questions.
        yield from _found("pooler", about, session_findings.pooling(using))
        for model in dict.fromkeys(each.question.model for each in asked):
            theirs = [each for each in asked if each.question.model is model]
            yield from _of_table(f"table {model._meta.db_table} of {about}", theirs, limit)
    for check, (find, vendors) in _SESSIONS.items():
        if connection.vendor in vendors:
            yield from _found(check, about, find(using, asked), limit)
        else:
            left_out.append(check)
    for each in asked:
        held = processor_findings.held_keys(each)
        yield from _found("held-key", each.processor.name, held, limit)
    if connection.vendor != "postgresql":
        left_out += _OF_TABLES
        what = f"{', '.join(left_out)}: {connection.display_name} is not asked for them"
        yield Finding(Level.LEFT_OUT, what, check="database", about=about)


def _of_table(about: str, users: Sequence[Asked], limit: tuple[str, float]) -> Iterator[Finding]:
    using, model = limit[0], users[0].question.model
    yield from _found("autovacuum", about, table_findings.autovacuum(using, model), limit)
    yield from _found("flag-index", about, table_findings.needless_indexes(using, users), limit)
    for each in users:
        found = table_findings.pending_share(using, each)
        yield from _found("pending", each.processor.name, found, limit)


def _found(
    check: str, about: str, findings: Iterable[Finding], limit: tuple[str, float] | None = None
) -> list[Finding]:
    """Return the findings; an error, of the database or of any code, is one as well.

    ``limit``: the database that is asked, and the seconds that each question may take.
    """
    try:
        with nullcontext() if limit is None else reading(*limit):
            found = list(findings)
    except Exception as error:  # noqa: BLE001  # the other findings are still to be found
        found = [_failed(error)]
    return [replace(each, check=check, about=each.about or about) for each in found]


def _failed(error: Exception) -> Finding:
    said = f"the database answered: {one_line(error)}"
    return unknown((said if is_database_error(error) else describe(error)).rstrip("."))
