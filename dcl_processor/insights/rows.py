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
from dcl_processor.operator_actions import claimed
from dcl_processor.operator_writes import is_pending
from dcl_processor.processor import BatchProcessor
from dcl_processor.runner.limits import check_alias
from dcl_processor.values import as_timedelta, constants_of

Rows = QuerySet[Any, Any] | None


class NotRecordedError(Exception):
    """No column shows what was asked; the message names the option that would."""


def question_of(processor: BatchProcessor[Any], using: str | None) -> Question[Any]:
    """Return the processor's question, as ``run()`` would ask it; raises the same errors."""
    check_alias("using", using or processor.using)
    check_alias("read_using", processor.read_using)
    return ask(
        processor.pending,
        label=processor.name,
        using=using or processor.using,
        read_using=processor.read_using,
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
    return question.queryset.filter(_has_attempts_left(processor, question) or Q())


def _has_attempts_left(processor: BatchProcessor[Any], question: Question[Any]) -> Q | None:
    return processor.retry.has_attempts_left(question.model) if processor.retry else None


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


def given_up(processor: BatchProcessor[Any], question: Question[Any]) -> Rows:
    """Return the rows that failed for good, or were discarded.

    Such a row has the dead letter. Without one it is still pending, and has used up its attempts.
    A row that was settled since, or that a worker has claimed, is neither.
    """
    if constants_of(processor.failed or {}):
        found = _with_dead_letter(processor, question)
    elif processor._has_dead_letter:
        found = _with_any_dead_letter(processor, question)
    else:
        found = _used_up(processor, question)
    if found is None:
        return None
    if processor.lease is not None:
        return found.filter(processor.lease.free())
    # Without a time, a row that was given up on may still contain the claim's constants.
    has_time = processor.claim is not None and processor.claimed_at is not None
    return found.exclude(claimed(processor)) if has_time else found


def _with_dead_letter(processor: BatchProcessor[Any], question: Question[Any]) -> Rows:
    """Return the rows that contain the constants of ``failed``, and not those of ``done``."""
    failed = constants_of(processor.failed or {})
    error = processor.retry.last_error if processor.retry else None
    if processor._has_fixed_flip:
        # A dead letter that is also written to handled rows does not tell the two apart.
        done = constants_of(processor.done or {})
        if not failed.items() <= done.items():
            found = question.table.filter(**failed)
            # A row that was put back and handled may still contain the dead letter.
            is_part = done.items() <= failed.items()
            return found if is_part else found.exclude(**done)
    elif error is not None:
        # A function as ``done`` may write the same, but a success clears the error.
        return question.table.filter(**failed, **{f"{error}__gt": ""})
    raise NotRecordedError("set a constant in failed=… that done does not write")


def _with_any_dead_letter(processor: BatchProcessor[Any], question: Question[Any]) -> Rows:
    """Return the rows that have a dead letter without constants: by their last error."""
    retry = processor.retry
    done = constants_of(processor.done or {}) if processor._has_fixed_flip else {}
    if retry is None or retry.next_attempt_at is None or retry.last_error is None or not done:
        raise NotRecordedError("set failed={…} with a constant that done does not write")
    ended = Q(**{f"{retry.next_attempt_at}__isnull": True, f"{retry.last_error}__gt": ""})
    if processor.claimed_at is not None:
        ended &= Q(**{f"{processor.claimed_at}__isnull": True})
    left = _has_attempts_left(processor, question)
    goes_on = is_pending(question) if left is None else is_pending(question) & left
    return question.table.filter(ended, ~goes_on).exclude(**done)


def _used_up(processor: BatchProcessor[Any], question: Question[Any]) -> Rows:
    """Return the pending rows that have no attempts left, and get no dead letter."""
    retry = processor.retry
    if retry is None or retry.max_attempts is None:
        return None  # each failed row is tried again
    left = _has_attempts_left(processor, question)
    if left is None:
        raise NotRecordedError("set failed={…}: max_attempts is a function of the row")
    return question.table.filter(~left, is_pending(question))


def with_error(processor: BatchProcessor[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the rows whose ``last_error`` has a text."""
    column = processor.retry.last_error if processor.retry else None
    if column is None:
        raise NotRecordedError("set retry=Retry(…) with last_error, which stores the last error")
    return question.table.filter(**{f"{column}__gt": ""})


def _name(processor: BatchProcessor[Any]) -> str:
    return str(processor.delivery).upper()
