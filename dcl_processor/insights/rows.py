"""The rows of a processor by their condition: querysets, which count, show and act alike.

A function returns ``None`` where no row can be in that condition, and raises ``NotRecordedError``
where rows may be, but no column shows it.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet

from dcl_processor.candidates.question import Question, ask
from dcl_processor.clock import DatabaseNow
from dcl_processor.definition.kinds import rules_of
from dcl_processor.operator_states import NotRecordedError, Rows, given_up, has_attempts_left
from dcl_processor.processor import BatchProcessor
from dcl_processor.runner.limits import check_alias
from dcl_processor.values import as_timedelta

__all__ = ["NotRecordedError", "Rows", "given_up"]


def question_of(processor: BatchProcessor[Any], using: str | None) -> Question[Any]:
    """Return the processor's question, as ``run()`` would ask it; raises the same errors."""
    check_alias("using", using or processor.using)
    return ask(
        processor.pending,
        label=processor.name,
        using=using or processor.using,
        flips=processor._locked_columns,
    )


def due(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the pending rows that a run would try now, if no session has them locked."""
    return question.queryset.filter(processor._due(question.model) or Q())


def later(processor: BatchProcessor[Any], question: Question[Any]) -> Rows:
    """Return the pending rows whose next attempt is still to come."""
    at = processor.retry.next_attempt_at if processor.retry else None
    return None if at is None else question.queryset.filter(**{f"{at}__gt": DatabaseNow()})


def waiting(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the pending rows, but not those that show that they have no attempts left."""
    return question.queryset.filter(has_attempts_left(processor, question) or Q())


def in_progress(
    processor: BatchProcessor[Any], question: Question[Any], doubt_after: float
) -> Rows:
    """Return the rows that have a lease, or a claim that is not in doubt yet."""
    if processor.lease is not None:
        return processor.in_progress().using(question.using)
    if processor.claim is not None and processor.claimed_at is not None:
        young = {f"{processor.claimed_at}__gt": DatabaseNow() - as_timedelta(doubt_after)}
        return processor.in_progress().using(question.using).filter(**young)
    if rules_of(processor).in_transaction:
        raise NotRecordedError(f"a {_name(processor)} worker only locks its row")
    raise NotRecordedError("set claim=… and claimed_at=…")


def in_doubt(processor: BatchProcessor[Any], question: Question[Any], doubt_after: float) -> Rows:
    """Return the rows whose claim is older than ``doubt_after`` seconds, and was never settled."""
    if processor.lease is not None or not rules_of(processor).marked_by:
        return None
    if processor.claim is None or processor.claimed_at is None:
        raise NotRecordedError("set claim=… and claimed_at=…")
    return processor.in_doubt(older_than=doubt_after).using(question.using)


def with_error(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the rows whose ``last_error`` has a text."""
    column = processor.retry.last_error if processor.retry else None
    if column is None:
        raise NotRecordedError("set retry=Retry(…) with last_error, which stores the last error")
    return question.table.filter(**{f"{column}__gt": ""})


def _name(processor: BatchProcessor[Any]) -> str:
    return str(processor.delivery).upper()
