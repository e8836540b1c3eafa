"""One row, from pending to done, or what happened instead."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from django.db.models import Model, Q, QuerySet

from dcl_processor.candidates.question import Question
from dcl_processor.errors import describe
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

from .handlers import asserting, raise_asserted, reaching_the_test, watched
from .questions import check_rows, question_of

M = TypeVar("M", bound=Model)


def assert_settles(processor: BatchProcessor[M], row: M, *, using: str | None = None) -> Report:
    """Run the processor for this row alone; the row has to be processed, and to leave pending.

    Returns the run's report. Works inside ``TestCase`` and on every database. The instance is not
    changed: ``refresh_from_db()`` loads what was written. Raises ``AssertionError`` with what
    happened instead; the handler's own ``AssertionError`` is raised unchanged, and so is any error
    of ``run()``, such as ``StillPending``.
    """
    question = question_of(processor, using)
    check_rows(processor, question, [row])

    def run() -> Report:
        twin = watched(processor, lambda _: asserting())
        return twin.run(filter=Q(pk=row.pk), using=using, wait_for_locked=0)

    report = reaching_the_test(run)
    raise_asserted([report])
    if report.processed != 1:
        _complain(processor, row, _instead(report) or _why_not(question, row, report), report)
    if not processor.repeats and question_of(processor, using).still_pending([row.pk]).exists():
        _complain(processor, row, "a row that was processed and is still pending", report)
    return report


def _complain(processor: BatchProcessor[Any], row: Any, got: str, report: Report) -> NoReturn:
    cause = report.failures[0].error if report.failures else report.error
    raise AssertionError(
        f"{processor.name}: expected {row!r} (key {row.pk}) to be processed and to leave pending, "
        f"got {got}."
    ) from cause


def _instead(report: Report) -> str:
    """Return what happened to the row, or an empty string if it was no candidate."""
    if report.failures:
        error = report.failures[0].error
        return f"a row that failed with {type(error).__name__}: {describe(error)}"
    said = {
        "discarded": "a row that its handler discarded",
        "snoozed": "a row that its handler snoozed",
        "skipped": "a row that was skipped, because another session has it locked",
        "stale": "a row that was finished, deleted or no longer pending when the run locked it",
        "lease_lost": "a row whose lease was lost before it was settled",
    }
    return next((words for count, words in said.items() if getattr(report, count)), "")


def _why_not(question: Question[Any], row: Any, report: Report) -> str:
    if report.error is not None:
        why = describe(report.error)
        return f"a row that was not started, because its resource could not be opened: {why}"
    if question.among([row.pk]).exists():
        return "a row that pending did not contain when the run began, and contains now"
    if question.still_pending([row.pk]).exists():
        return (
            "a row that is pending and not due: its next attempt is later, its attempts are used "
            "up, or it is leased"
        )
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    if table.filter(pk=row.pk).exists():
        return "a row that pending does not contain"
    return "a row that is not in the database"
