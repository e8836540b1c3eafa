"""What an operator does with rows that are in doubt, or were given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Model, Q, QuerySet

from .candidates.question import Question, ask
from .candidates.scan import WINDOW
from .clock import DatabaseNow
from .definition.model_columns import check_columns
from .exceptions import InvalidOption
from .locking.waiting import holders, lock_rows, settlement_transaction
from .settlement.flip import with_cleared_retry
from .values import TEN_YEARS, Values, as_timedelta, constants_of, expect_seconds, resolve

if TYPE_CHECKING:
    from .definition.definition import Definition


def in_doubt(processor: Definition[Any], older_than: float | timedelta) -> QuerySet[Any, Any]:
    """Return the rows that have been claimed for longer than ``older_than``."""
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… and claimed_at=… for in_doubt(), got a processor "
            "without both; add them, so that each claim records its time."
        )
    if processor.lease is not None:
        raise InvalidOption(
            f"{processor.name}: expected a processor without a lease for in_doubt(), got "
            f"{processor.lease!r}, after which another worker takes a row over; use in_progress()."
        )
    expect_seconds(f"{processor.name}: expected older_than", older_than, most=TEN_YEARS)
    since = Q(**{f"{processor.claimed_at}__lte": DatabaseNow() - as_timedelta(older_than)})
    return _rows(processor).filter(_claimed(processor), since).order_by(processor.claimed_at, "pk")


def in_progress(processor: Definition[Any]) -> QuerySet[Any, Any]:
    """Return the rows that a worker has claimed or leased, the longest-held first."""
    if processor.lease is not None:
        since = processor.claimed_at or processor.lease.field
        return (
            _rows(processor)
            .filter(_claimed(processor), processor.lease.alive())
            .order_by(since, "pk")
        )
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected a lease, or claim=… and claimed_at=…, for in_progress(), "
            "got a processor without both; add them, so that each row shows that it is claimed."
        )
    return _rows(processor).filter(_claimed(processor)).order_by(processor.claimed_at, "pk")


def mark_done(
    processor: Definition[Any], rows: QuerySet[Any, Any], values: Values | None = None
) -> int:
    """Write the flip, or ``values``, to those of the rows that are claimed."""
    if processor.claim is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… for mark_done(), which writes only to claimed "
            "rows, got a processor without claim; update the rows with Django instead."
        )
    question = _check_rows(processor, rows, "mark_done")
    done = _flip_of(processor, values, question.model)
    return _write(processor, rows, question, _claimed(processor), done)


def requeue(processor: Definition[Any], rows: QuerySet[Any, Any]) -> int:
    """Put rows back into ``pending``, as if they had never been tried."""
    if processor.reset is None:
        raise InvalidOption(
            f"{processor.name}: expected reset=… for requeue(), got a processor without reset; set "
            "it to the values that put a row back into pending."
        )
    question = _check_rows(processor, rows, "requeue")
    return _write(processor, rows, question, Q(), processor.reset)


def _flip_of(processor: Definition[Any], values: Any, model: type[Model]) -> Values:
    """Return the operator's values that take a claimed row out of pending, or else ``done``."""
    if values is None:
        if processor.done is None:
            raise InvalidOption(
                f"{processor.name}: expected mark_done(rows, values={{…}}) where done=… is not a "
                "mapping, got no values; pass the values that take a row out of pending."
            )
        return processor.done
    if not isinstance(values, Mapping) or not values:
        raise InvalidOption(
            f"{processor.name}: expected mark_done()'s values to be a mapping of column names to "
            f"values, such as {{'sent': True}}, got {values!r}."
        )
    check_columns(values, model, processor.name, "values")
    return values


def _write(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    question: Question[Any],
    condition: Q,
    values: Values,
) -> int:
    """Lock the rows, and write to those of them that still meet the condition."""
    resolved = resolve(with_cleared_retry(processor, values))
    written = {**_unclaimed(processor), **resolved}
    others = [t for t in holders(question.model, written) if t is not question.model]
    meant = rows.order_by().filter(condition)
    keys = list(dict.fromkeys(meant.order_by("pk").values_list("pk", flat=True)))
    count = 0
    with settlement_transaction(question.using):
        for at in range(0, len(keys), WINDOW):
            some = keys[at : at + WINDOW]
            for table in (question.model, *others):
                lock_rows(question, table, some)
            # Race: double claim. A worker or a person may have written to a row since it was read.
            still = set(meant.filter(pk__in=some).values_list("pk", flat=True))
            count += question.table.filter(pk__in=still).update(**written)
    return count


def _check_rows(processor: Definition[Any], rows: Any, method: str) -> Question[Any]:
    """Refuse rows that are not the processor's, or that could not be written."""
    question = ask(processor.pending, label=processor.name, using=processor.using)
    model = question.model
    ours = isinstance(rows, QuerySet) and rows.model._meta.concrete_model is model
    if not ours or rows.query.is_sliced:
        got = "a slice" if ours else repr(rows) if isinstance(rows, Model) else _kind(rows)
        raise InvalidOption(
            f"{processor.name}: expected {method}() to take a queryset of {model._meta.label} "
            f"without a slice, got {got}; for one row write …objects.filter(pk=…)."
        )
    named: Any = rows
    chosen = named._db  # noqa: SLF001  # .db would ask the router
    return replace(question, using=chosen or question.using)


def _kind(rows: Any) -> str:
    if isinstance(rows, QuerySet):
        return f"a queryset of {rows.model._meta.label}"
    return f"an object of type {type(rows).__name__}"


def _unclaimed(processor: Definition[Any]) -> dict[str, Any]:
    lease = {processor.lease.field: None} if processor.lease else {}
    return {**({processor.claimed_at: None} if processor.claimed_at else {}), **lease}


def _rows(processor: Definition[Any]) -> QuerySet[Any, Any]:
    question = ask(processor.pending, label=processor.name, using=processor.using)
    return QuerySet(question.model, using=question.using)


def _claimed(processor: Definition[Any]) -> Q:
    """Recognise a claimed row by the constants that the claim wrote, and by its time."""
    # A settled row may still contain the claim's constants, but neither the time of the claim nor
    # a lease.
    times = [processor.claimed_at, processor.lease.field if processor.lease else None]
    since = {f"{name}__isnull": False for name in times if name}
    return Q(**constants_of(processor.claim or {}), **since)
