"""Examines what processors need of their databases, tables and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from django.db import connections

from dcl_processor.database.contention import is_database_error
from dcl_processor.database.time_limit import reading
from dcl_processor.diagnosis import describe, explain, one_line
from dcl_processor.processor import BatchProcessor

from . import findings
from .answer import Finding, Level, problem, unknown
from .statements import Asked
from .status import TIMEOUT

#: What only PostgreSQL has figures for.
_OF_POSTGRESQL = "snapshot, idle-in-transaction, autovacuum, flag-index"


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
    yield from _found("read-only", about, findings.writable(using), limit)
    for each in asked:
        yield from _found("router", each.processor.name, findings.routing(each), limit)
    if connection.vendor != "postgresql":
        what = f"{_OF_POSTGRESQL}: {connection.display_name} is not asked for them"
        yield Finding(Level.LEFT_OUT, what, check="database", about=about)
        return
    yield from _found("snapshot", about, findings.snapshots(using), limit)
    idle = findings.idle_transactions(using, asked)
    yield from _found("idle-in-transaction", about, idle, limit)
    for model in dict.fromkeys(each.question.model for each in asked):
        table = f"table {model._meta.db_table} of {about}"
        users = [each for each in asked if each.question.model is model]
        yield from _found("autovacuum", table, findings.autovacuum(using, model), limit)
        needless = findings.needless_indexes(using, users)
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
