"""Explains, in one sentence for the person who started it, why a run could not be made."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from dcl_processor.exceptions import ProcessorError, StillPending
from dcl_processor.options.kinds import Delivery
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import ask
from dcl_processor.report import errors
from dcl_processor.report.errors import shown
from dcl_processor.report.report import Report
from dcl_processor.sql.errors import is_database_error, is_statement_timeout


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a run did not complete; ``report``: what it did until then."""

    sentence: str
    traceback: str = ""
    report: Report | None = None
    #: Whether every further try would fail in the same way.
    is_final: bool = False
    #: Whether the log has the sentence.
    is_logged: bool = False

    @classmethod
    def of(cls, error: Exception, processor: Definition[Any], using: str | None) -> Trouble:
        """Explain the exception that is being handled."""
        sentence, trace = explain(error, processor, using), traceback.format_exc()
        # A row may cause StillPending, but no row fixes an option.
        is_final = isinstance(error, ImproperlyConfigured) and not isinstance(error, StillPending)
        report = getattr(error, "report", None)
        if not isinstance(report, Report) or not report.did_something:
            return cls(sentence, trace, is_final=is_final)
        return cls(f"{sentence}{in_doubt(processor)}", trace, report, is_final)

    @classmethod
    def of_resource(cls, error: BaseException) -> Trouble:
        """Return why no handler could be called; the traceback is in the log."""
        return cls(f"expected the resource to open, got {describe(error)}.")


def explain(error: BaseException, processor: Definition[Any], using: str | None = None) -> str:
    """Return what was expected, what came, and how to fix it; queries a database that failed."""
    if isinstance(error, ProcessorError):
        return one_line(error).removeprefix(f"{processor.name}: ")
    if is_database_error(error):
        # The look at the columns of a table that a migration has locked would wait as well, and
        # without a limit.
        fault = None if is_statement_timeout(error) else _find_fault(processor, using)
        return fault or f"the database reported: {one_line(error)}"
    return describe(error)


def in_doubt(processor: Definition[Any]) -> str:
    """Return what an interrupted run leaves behind if its claims are committed before the work."""
    if processor.delivery != Delivery.AT_MOST_ONCE:
        return ""
    if processor.claim is None:
        return f"; {processor.name}: rows that were flipped and not handled count as done"
    return f"; {processor.name}: rows that were claimed and not settled stay claimed, in doubt"


def describe(error: BaseException) -> str:
    """Return the error's kind and text in one line, wherever it was raised."""
    kind, text = type(error).__name__, one_line(error)
    return f"{kind}: {text}" if text else kind


def one_line(error: BaseException) -> str:
    """Return the error's text without secrets, and without line breaks, which drivers often add."""
    return shown(errors.text(error))


def _find_fault(processor: Definition[Any], using: str | None) -> str | None:
    try:
        question = ask(processor.pending, label=processor.name, using=using or processor.using)
    except Exception:  # noqa: BLE001  # the error that is being explained, in most cases
        return None
    alias, parents = question.using, question.model._meta.all_parents
    return _unreachable(alias) or _unmigrated(connections[alias], (question.model, *parents))


def _unreachable(alias: str) -> str | None:
    connection = connections[alias]
    connection.close_if_unusable_or_obsolete()
    try:
        connection.ensure_connection()
    except Error as error:
        return f"expected the database {alias!r} to answer, got: {one_line(error)}"
    return None


def _unmigrated(connection: BaseDatabaseWrapper, models: tuple[Any, ...]) -> str | None:
    try:
        with connection.cursor() as cursor:
            there = set(connection.introspection.table_names(cursor, include_views=True))
            for options in (model._meta for model in models):
                # One with quotes names its schema.
                if '"' not in options.db_table and options.db_table not in there:
                    return _migrate(connection.alias, f"the table {options.db_table}")
                found = connection.introspection.get_table_description(cursor, options.db_table)
                names = {column.name for column in found}
                for field in options.local_concrete_fields:
                    if field.column not in names:
                        missing = f"the column {field.column} in the table {options.db_table}"
                        return _migrate(connection.alias, missing)
    except DatabaseError:
        return None  # for example because the error has broken the caller's transaction
    return None


def _migrate(alias: str, missing: str) -> str:
    option = "" if alias == "default" else f" --database {alias}"
    return f"expected {missing}, got none in the database {alias!r}; run manage.py migrate{option}."
