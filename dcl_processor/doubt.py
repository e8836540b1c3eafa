"""What a person does about rows that are in doubt, or were given up on."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Q, QuerySet

from . import pending, settlement
from .clock import DatabaseNow
from .exceptions import InvalidOption

if TYPE_CHECKING:
    from .definition import BatchProcessor


def in_doubt(processor: BatchProcessor[Any], older_than: float | timedelta) -> QuerySet[Any, Any]:
    """Return the rows that are claimed, and have been for longer than that."""
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… and claimed_at=… to tell since when a row is "
            "claimed, got in_doubt() without both."
        )
    age = older_than if isinstance(older_than, timedelta) else timedelta(seconds=older_than)
    since = Q(**{f"{processor.claimed_at}__lte": DatabaseNow() - age})
    return _rows(processor).filter(_claimed(processor), since).order_by(processor.claimed_at, "pk")


def mark_done(processor: BatchProcessor[Any], rows: QuerySet[Any, Any]) -> int:
    """Write the flip to those of the rows that are claimed."""
    if processor.claim is None or processor.done is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… and a plain done=… to say what settles a claimed "
            "row, got mark_done() without both."
        )
    values = {**_unclaimed(processor), **settlement.resolve(processor.done)}
    return rows.order_by().filter(_claimed(processor)).update(**values)


def requeue(processor: BatchProcessor[Any], rows: QuerySet[Any, Any]) -> int:
    """Put rows back into ``pending``, as if they had never been tried."""
    if processor.reset is None:
        raise InvalidOption(
            f"{processor.name}: expected reset=… to say what puts a row back into pending, got "
            "requeue() without it."
        )
    fresh = processor.retry.fresh() if processor.retry else {}
    values = {**fresh, **_unclaimed(processor), **settlement.resolve(processor.reset)}
    return rows.order_by().update(**values)


def _unclaimed(processor: BatchProcessor[Any]) -> dict[str, Any]:
    lease = {processor.lease.field: None} if processor.lease else {}
    return {**({processor.claimed_at: None} if processor.claimed_at else {}), **lease}


def _rows(processor: BatchProcessor[Any]) -> QuerySet[Any, Any]:
    question = pending.ask(processor.pending, label=processor.name, using=processor.using)
    return QuerySet(question.model, using=question.using)


def _claimed(processor: BatchProcessor[Any]) -> Q:
    """Recognise a claimed row by the constants that the claim wrote."""
    return Q(
        **{
            name: value
            for name, value in (processor.claim or {}).items()
            if not hasattr(value, "resolve_expression") and not callable(value)
        }
    )
