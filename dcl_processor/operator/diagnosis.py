"""Explains, in one sentence for the person who started it, why a run could not be made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from dcl_processor.exceptions import ProcessorError, StillPending
from dcl_processor.options.options import Definition
from dcl_processor.report.errors import described, shown, text
from dcl_processor.report.report import Report
from dcl_processor.sql.errors import is_database_error


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a run did not complete; ``report``: what it did until then."""

    sentence: str
    report: Report | None = None
    #: Whether every further try would fail in the same way.
    is_final: bool = False

    @classmethod
    def of(cls, error: Exception, processor: Definition[Any], using: str | None) -> Trouble:
        """Return why a run raised the error."""
        # A row may cause StillPending, but no row fixes an option.
        is_final = isinstance(error, ImproperlyConfigured) and not isinstance(error, StillPending)
        report = getattr(error, "report", None)
        has_report = isinstance(report, Report) and report.did_something
        return cls(explain(error, processor, using), report if has_report else None, is_final)

    @classmethod
    def of_resource(cls, error: BaseException) -> Trouble:
        """Return why no handler could be called; the traceback is in the log."""
        return cls(f"expected the resource to open, got {describe(error)}.")


def explain(error: BaseException, processor: Definition[Any], using: str | None = None) -> str:
    """Return what was expected, what came, and how to fix it; or what the database said."""
    if isinstance(error, ProcessorError):
        return described(error).removeprefix(f"{processor.name}: ")
    if is_database_error(error):
        alias = using or processor.using
        named = f"the database {alias!r}" if alias else "the database"
        return f"{named} reported: {described(error)}"
    return describe(error)


def describe(error: BaseException) -> str:
    """Return the error's kind and text in one line, wherever it was raised."""
    kind, said = type(error).__name__, shown(text(error))
    return f"{kind}: {said}" if said else kind
