"""One row, from pending to done, or what happened instead."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, Literal, TypeVar

from django.db.models import Model, Q

from dcl_processor.exceptions import InvalidOption
from dcl_processor.insights.row import show
from dcl_processor.operator.backlog import question_of
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import described
from dcl_processor.report.report import COUNTS, Report

M = TypeVar("M", bound=Model)
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

    ``outcome``: what the row is to come to instead. ``resource``: what the handler gets instead of
    the ``resource()``. Returns the run's report. Works inside ``TestCase`` and on every database.
    The instance is not changed: ``refresh_from_db()`` loads what was written. Raises
    ``AssertionError`` with what happened instead; the handler's own ``AssertionError`` is raised
    with its traceback as a note, and any error of ``run()`` unchanged.
    """
    _ask(processor, row, using)
    twin = copy.copy(processor)
    if resource is not None:
        vars(twin).update(resource=lambda: nullcontext(resource))
    report = twin.run(filter=Q(pk=row.pk), using=using, wait_for_locked=0)
    for failure in report.failures:
        if isinstance(failure.error, AssertionError):
            failure.error.add_note(failure.traceback)
            raise failure.error
    if getattr(report, outcome) == 1:
        return report
    error = report.failures[0].error if report.failures else report.error
    counts = [f"1 {name}" for name in COUNTS if getattr(report, name)]
    if error is not None:
        counts.append(f"{type(error).__name__}: {described(error)}")
    got = ", ".join(counts) or f"no attempt: {_reason(processor, row, using)}"
    raise AssertionError(
        f"{processor.name}: expected {row!r} (key {row.pk}) to be {outcome}, got {got}."
    ) from error


def make_due(processor: BatchProcessor[M], row: M, *, using: str | None = None) -> None:
    """Let the time come for which the row waits: that of its next attempt, or the lease's end."""
    question, retry, lease = _ask(processor, row, using), processor.retry, processor.lease
    names = [retry.next_attempt_at if retry else None, lease.field if lease else None]
    waiting = question.table.filter(pk=row.pk)
    for name in filter(None, names):
        waiting.filter(**{f"{name}__isnull": False}).update(**{name: DatabaseNow()})


def _ask(processor: BatchProcessor[M], row: M, using: str | None) -> Question[Any]:
    question = question_of(processor, using)
    if not isinstance(row, question.model):
        label = question.model._meta.label
        raise InvalidOption(f"{processor.name}: expected a row of {label}, got {row!r}.")
    return question


def _reason(processor: BatchProcessor[M], row: M, using: str | None) -> str:
    """Return why the run did not try the row, as ``manage.py processors show`` does."""
    found = show(processor, row.pk, using=using).value
    return "it is not in the database" if found is None else found.reason
