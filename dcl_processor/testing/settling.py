"""One row, from pending to done, or what happened instead."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NoReturn, TypeVar

from django.db import connections
from django.db.models import Model, Q, QuerySet

from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator.backlog import question_of
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import describe
from dcl_processor.report.interrupts import Interruption
from dcl_processor.report.report import Report

M = TypeVar("M", bound=Model)
P = TypeVar("P", bound=BatchProcessor[Any])
Around = Callable[[Sequence[Any]], AbstractContextManager[Any]]
Outcome = Literal["processed", "failed", "snoozed", "discarded"]


def assert_settles(
    processor: BatchProcessor[M],
    row: M,
    *,
    outcome: Outcome = "processed",
    resource: Any = None,
    using: str | None = None,
) -> Report:
    """Run the processor for this row alone; the row has to be processed, and to leave pending.

    ``outcome``: what the row is to come to instead; the log of an expected failure is one line,
    without the traceback. ``resource``: what the handler gets instead of the ``resource()``.
    Returns the run's report. Works inside ``TestCase`` and on every database. The instance is not
    changed: ``refresh_from_db()`` loads what was written. Raises ``AssertionError`` with what
    happened instead; the handler's own ``AssertionError`` is raised unchanged, and so is any error
    of ``run()``, such as ``StillPending``.
    """
    question = question_of(processor, using, processor._due)
    check_row(processor, question, row)
    twin = watched(processor, lambda _: asserting())
    if resource is not None:
        vars(twin).update(resource=lambda: nullcontext(resource))
    try:
        with nullcontext() if outcome == "processed" else _in_one_line():
            report = twin.run(filter=Q(pk=row.pk), using=using, wait_for_locked=0)
    except HandlerAsserted as carrier:
        raise carrier.error from carrier.error.__cause__  # and not from the carrier
    raise_asserted([report])
    if getattr(report, outcome) != 1:
        got = _instead(report, but=outcome) or _why_not(question, row, report)
        if processor._is_async and connections[question.using].in_atomic_block:
            got += "; an async handler does not see the rows of a TestCase: use TransactionTestCase"
        _complain(processor, row, outcome, got, report)
    still = question_of(processor, using, processor._due).still_pending([row.pk])
    if outcome == "processed" and still.exists():
        _complain(processor, row, outcome, "a row that was processed and is still pending", report)
    return report


def make_due(processor: BatchProcessor[M], row: M, *, using: str | None = None) -> None:
    """Let the time come for which the row waits: that of its next attempt, or the lease's end."""
    question, retry, lease = question_of(processor, using), processor.retry, processor.lease
    check_row(processor, question, row)
    names = [retry.next_attempt_at if retry else None, lease.field if lease else None]
    waiting = question.table.filter(pk=row.pk)
    for name in filter(None, names):
        waiting.filter(**{f"{name}__isnull": False}).update(**{name: DatabaseNow()})


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Log no traceback of an error that is expected."""

    def without_traceback(record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True

    logger = logging.getLogger("dcl_processor")
    logger.addFilter(without_traceback)
    try:
        yield
    finally:
        logger.removeFilter(without_traceback)


def _complain(
    processor: BatchProcessor[Any], row: Any, outcome: Outcome, got: str, report: Report
) -> NoReturn:
    cause = report.failures[0].error if report.failures else report.error
    expected = "be processed and to leave pending" if outcome == "processed" else f"be {outcome}"
    raise AssertionError(
        f"{processor.name}: expected {row!r} (key {row.pk}) to {expected}, got {got}."
    ) from cause


def _instead(report: Report, *, but: Outcome) -> str:
    """Return what happened to the row, or an empty string if it was no candidate."""
    if but != "processed" and report.processed:
        return "a row that was processed"
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


# --- the processor as a test has it: its handler with what the test notes


def check_row(processor: BatchProcessor[Any], question: Question[Any], row: Any) -> None:
    """Raise ``InvalidOption`` unless the row is of the processor's model."""
    if not isinstance(row, question.model):
        raise InvalidOption(
            f"{processor.name}: expected a row of {question.model._meta.label}, got {row!r}."
        )


class HandlerAsserted(Interruption):
    """Carries a handler's ``AssertionError`` past the code that would make it a row's failure."""

    def __init__(self, error: AssertionError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def asserting() -> Iterator[None]:
    """Let an ``AssertionError`` end the run, because it fails the test and not a row."""
    try:
        yield
    except AssertionError as error:
        raise HandlerAsserted(error) from error


def raise_asserted(reports: Sequence[Report]) -> None:
    """Raise an ``AssertionError`` that code beside the handler raised, such as ``get_done()``."""
    for failure in (failure for report in reports for failure in report.failures):
        for error in (failure.error, failure.error.__cause__):
            if isinstance(error, AssertionError):
                # The run has released the frames, and kept the traceback as text.
                error.add_note(failure.traceback)
                raise error


def watched(processor: P, around: Around) -> P:
    """Return a copy of the processor; ``around(keys)`` is entered around each handler call."""
    name = "process_batch" if processor._handles_batches else "process"
    handle = getattr(processor, name)

    def keys(given: Any) -> list[Any]:
        return [row.pk for row in given] if processor._handles_batches else [given.pk]

    @functools.wraps(handle)
    def call(given: Any, /, *arguments: Any) -> Any:
        with around(keys(given)):
            return handle(given, *arguments)

    @functools.wraps(handle)
    async def call_on_the_loop(given: Any, /, *arguments: Any) -> Any:
        with around(keys(given)):
            return await handle(given, *arguments)

    twin = copy.copy(processor)
    vars(twin)[name] = call_on_the_loop if processor._is_async else call
    return twin
