"""One row, from pending to done, or what happened instead."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

from django.db.models import Model, Q

from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator.backlog import question_of
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described
from dcl_processor.report.interrupts import Interruption
from dcl_processor.report.report import Report

M = TypeVar("M", bound=Model)
P = TypeVar("P", bound=BatchProcessor[Any])
Outcome = Literal["processed", "failed", "snoozed", "discarded"]

_INSTEAD = {
    "processed": "a row that was processed",
    "discarded": "a row that its handler discarded",
    "snoozed": "a row that its handler snoozed",
    "skipped": "a row that was skipped, because another session has it locked",
    "stale": "a row that was finished, deleted or no longer pending when the run locked it",
    "lease_lost": "a row whose lease was lost before it was settled",
}


def assert_settles(
    processor: BatchProcessor[M],
    row: M,
    *,
    outcome: Outcome = "processed",
    resource: Any = None,
    using: str | None = None,
) -> Report:
    """Run the processor for this row alone; the row has to be processed, and to leave pending.

    ``outcome``: what the row is to come to instead. ``resource``: what the handler gets instead of
    the ``resource()``. Returns the run's report. Works inside ``TestCase`` and on every database.
    The instance is not changed: ``refresh_from_db()`` loads what was written. Raises
    ``AssertionError`` with what happened instead; the handler's own ``AssertionError`` is raised
    unchanged, and so is any error of ``run()``, such as ``StillPending``.
    """
    question = _checked(processor, row, using)
    twin = watched(processor, lambda _: nullcontext())
    if resource is not None:
        vars(twin).update(resource=lambda: nullcontext(resource))
    try:
        report = twin.run(filter=Q(pk=row.pk), using=using, wait_for_locked=0)
    except HandlerAsserted as carrier:
        raise carrier.error from carrier.error.__cause__  # and not from the carrier
    if getattr(report, outcome) == 1:
        return report
    expected = "be processed and to leave pending" if outcome == "processed" else f"be {outcome}"
    got = _instead(report) or _why_not(question, row, report)
    raise AssertionError(
        f"{processor.name}: expected {row!r} (key {row.pk}) to {expected}, got {got}."
    ) from (report.failures[0].error if report.failures else report.error)


def make_due(processor: BatchProcessor[M], row: M, *, using: str | None = None) -> None:
    """Let the time come for which the row waits: that of its next attempt, or the lease's end."""
    question, retry, lease = _checked(processor, row, using), processor.retry, processor.lease
    names = [retry.next_attempt_at if retry else None, lease.field if lease else None]
    waiting = question.table.filter(pk=row.pk)
    for name in filter(None, names):
        waiting.filter(**{f"{name}__isnull": False}).update(**{name: DatabaseNow()})


def _checked(processor: BatchProcessor[M], row: M, using: str | None) -> Question[Any]:
    question = question_of(processor, using, processor._due)
    if not isinstance(row, question.model):
        label = question.model._meta.label
        raise InvalidOption(f"{processor.name}: expected a row of {label}, got {row!r}.")
    return question


def _instead(report: Report) -> str:
    """Return what happened to the row, or an empty string if it was no candidate."""
    if report.failures:
        error = report.failures[0].error
        return f"a row that failed with {type(error).__name__}: {described(error)}"
    return next((words for count, words in _INSTEAD.items() if getattr(report, count)), "")


def _why_not(question: Question[Any], row: Any, report: Report) -> str:
    if report.error is not None:
        why = described(report.error)
        return f"a row that was not started, because its resource could not be opened: {why}"
    if question.still_pending([row.pk]).exists():
        return (
            "a row that is pending and not due: its next attempt is later, its attempts are used "
            "up, or it is leased"
        )
    is_there = question.table.filter(pk=row.pk).exists()
    return (
        "a row that pending does not contain" if is_there else "a row that is not in the database"
    )


class HandlerAsserted(Interruption):
    """Carries a handler's ``AssertionError`` past the code that would make it a row's failure."""

    def __init__(self, error: AssertionError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _asserting() -> Iterator[None]:
    """Let an ``AssertionError`` end the run, because it fails the test and not a row."""
    try:
        yield
    except AssertionError as error:
        raise HandlerAsserted(error) from error


def watched(processor: P, around: Callable[[Sequence[Any]], AbstractContextManager[Any]]) -> P:
    """Return a copy of the processor; ``around(keys)`` is entered around each handler call."""
    name = "process_batch" if processor._handles_batches else "process"
    handle = getattr(processor, name)

    @contextmanager
    def watching(given: Any) -> Iterator[None]:
        rows = given if processor._handles_batches else [given]
        with around([row.pk for row in rows]), _asserting():
            yield

    @functools.wraps(handle)
    def call(given: Any, /, *arguments: Any) -> Any:
        with watching(given):
            return handle(given, *arguments)

    @functools.wraps(handle)
    async def call_on_the_loop(given: Any, /, *arguments: Any) -> Any:
        with watching(given):
            return await handle(given, *arguments)

    twin = copy.copy(processor)
    vars(twin)[name] = call_on_the_loop if processor._is_async else call
    return twin
