"""What an operator does with rows that are in doubt, or were given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Model, Q, QuerySet

from .candidates.question import Question, ask
from .clock import DatabaseNow
from .definition.model_columns import check_columns
from .exceptions import InvalidOption
from .operator_states import (
    claimed,
    default_age,
    is_distinct,
    is_given_up,
    is_pending,
    not_claimed_lately,
    unsettled,
)
from .operator_writes import SHOWN, Write, Written
from .outcomes import Discard
from .report import MOST_COUNTED, counted
from .settlement.outcome_values import with_cleared_retry
from .values import TEN_YEARS, Values, as_timedelta, expect_seconds

if TYPE_CHECKING:
    from .definition.definition import Definition

logger = logging.getLogger("dcl_processor")

#: Seconds for which rows that other sessions have locked are tried again.
LOCKED_FOR = 10.0


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
    return _rows(processor).filter(claimed(processor), since).order_by(processor.claimed_at, "pk")


def doubts(processor: Definition[Any], using: str | None = None) -> tuple[int, str]:
    """Return how many rows are in doubt, up to 10,001, and a sentence; 0 if no column shows it."""
    if processor.claim is None or processor.claimed_at is None or processor.lease is not None:
        return 0, ""
    age = default_age(processor)
    try:
        rows = in_doubt(processor, age).order_by()
        number = rows.using(using or rows.db)[: MOST_COUNTED + 1].count()
    except Exception:  # noqa: BLE001  # a run reports what pending, or the database, raises
        return 0, ""
    return number, (
        f"{counted(number)} row{'s are' if number > 1 else ' is'} in doubt: claimed over {age:g} s "
        f"ago and never settled; no run handles them again; see processors status "
        f"{processor.name}, then requeue or mark-done --in-doubt."
    )


def in_progress(processor: Definition[Any]) -> QuerySet[Any, Any]:
    """Return the rows that a worker has claimed or leased, the longest-held first."""
    if processor.lease is not None:
        since = processor.claimed_at or processor.lease.field
        return (
            _rows(processor)
            .filter(claimed(processor), processor.lease.alive())
            .order_by(since, "pk")
        )
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected a lease, or claim=… and claimed_at=…, for in_progress(), "
            "got a processor without both; add them, so that each row shows that it is claimed."
        )
    return _rows(processor).filter(claimed(processor)).order_by(processor.claimed_at, "pk")


def mark_done(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    values: Values | None = None,
    *,
    force: bool = False,
) -> int:
    """Write the flip, or ``values``, to the claimed and given up rows; ``force``: to all."""
    state = "or neither claimed nor given up; force=True marks what is not leased"
    return _act(to_mark_done(processor, rows, values, force=force), "mark_done", state)


def to_mark_done(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    values: Values | None = None,
    *,
    force: bool = False,
) -> Write:
    """Return what ``mark_done()`` writes, and to which rows."""
    question = _check_rows(processor, rows, "mark_done")
    flip = _values(processor, "mark_done", "done", values, question.model)
    done = with_cleared_retry(processor, flip)
    _refuse_indistinct(processor, "mark_done")
    unchecked = "" if values is None else "mark_done"
    condition = Q() if force else is_given_up(processor, question)
    if processor.claim is not None and not force:
        condition |= claimed(processor)
    return Write(processor, question, rows, condition, done, unchecked)


def requeue(processor: Definition[Any], rows: QuerySet[Any, Any], *, force: bool = False) -> int:
    """Put those of the rows back that are not done, as if they had never been tried."""
    state = (
        f"claimed less than {default_age(processor):g} s ago, done, or not waiting yet; force=True "
        "puts back what is not leased, and repeats its effect"
    )
    return _act(to_requeue(processor, rows, force=force), "requeue", state)


def to_requeue(
    processor: Definition[Any], rows: QuerySet[Any, Any], *, force: bool = False
) -> Write:
    """Return what ``requeue()`` writes, and to which rows."""
    if processor.reset is None:
        raise InvalidOption(
            f"{processor.name}: expected reset=… for requeue(), got a processor without reset; set "
            "it to the values that put a row back into pending."
        )
    question = _check_rows(processor, rows, "requeue")
    reset = with_cleared_retry(processor, processor.reset)
    # Race: double claim. Under its lock, because a worker may have settled the row meanwhile: a
    # paid charge that is put back is paid twice, and so is one that is being paid now.
    condition = Q() if force else unsettled(processor, question) & not_claimed_lately(processor)
    return Write(processor, question, rows, condition, reset)


def _act(write: Write, method: str, state: str) -> int:
    """Write to the rows in the state of the action, and tell of the others; return how many."""
    if write.condition:
        _warn(write, method, *write.others(), f"leased by a worker, {state}")
    written = Written()
    write.to_free(write.choose(), written, seconds=LOCKED_FOR)
    for error in written.failed.values():
        raise error
    _warn(write, method, len(written.locked), written.locked[:SHOWN], "locked by other sessions")
    return len(written.written)


def _warn(write: Write, method: str, number: int, some: Sequence[Any], why: str) -> None:
    if number:
        more = ", …" if number > len(some) else ""
        logger.warning(
            "%s: %s() leaves %d %s as %s (%s%s): %s.",
            *(write.processor.name, method, number, "row" if number == 1 else "rows"),
            *("it is" if number == 1 else "they are", ", ".join(map(repr, some)), more, why),
        )


def discard(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    reason: str = "",
    values: Values | None = None,
) -> int:
    """Write ``failed``, or ``values``, to those of the rows that are pending or claimed."""
    write = to_discard(processor, rows, reason, values)
    return _act(write, "discard", "or neither pending nor claimed")


def to_discard(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    reason: str = "",
    values: Values | None = None,
) -> Write:
    """Return what ``discard()`` writes, and to which rows."""
    question = _check_rows(processor, rows, "discard")
    dead_letter = _values(processor, "discard", "failed", values, question.model)
    _refuse_indistinct(processor, "discard")
    retry = processor.retry
    if retry is not None:
        noted = retry.given_up(Discard(reason), 0, question.model)
        # No attempt was made, so their number stays.
        noted.pop(retry.attempts or "", None)
        dead_letter = {**noted, **(retry.on_failure or {}), **dead_letter}
    unsettled = is_pending(question)
    if processor.claim is not None:
        unsettled |= claimed(processor)
    unchecked = "" if values is None else "discard"
    return Write(processor, question, rows, unsettled, dead_letter, unchecked)


def _values(
    processor: Definition[Any], method: str, option: str, values: Any, model: type[Model]
) -> Values:
    """Return the operator's values that take a row out of ``pending``, or those of the option."""
    own: Values | None = getattr(processor, option)
    if values is None:
        if own is None:
            raise InvalidOption(
                f"{processor.name}: expected {method}(rows, values={{…}}) where {option}=… is not "
                "a mapping, got no values; pass the values that take a row out of pending."
            )
        return own
    if not isinstance(values, Mapping) or not values:
        raise InvalidOption(
            f"{processor.name}: expected {method}()'s values to be a mapping of column names to "
            f"values, such as {{'sent': True}}, got {values!r}."
        )
    check_columns(values, model, processor.name, "values")
    return values


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


def _rows(processor: Definition[Any]) -> QuerySet[Any, Any]:
    question = ask(processor.pending, label=processor.name, using=processor.using)
    return QuerySet(question.model, using=question.using)


def _refuse_indistinct(processor: Definition[Any], method: str) -> None:
    """Raise unless a column distinguishes a claimed row from one that is settled."""
    if processor.claim is not None and not is_distinct(processor):
        raise InvalidOption(
            f"{processor.name}: expected claimed_at=… for {method}(), because no constant of "
            "done=… tells a handled row from a claimed one, got a claim without it; set it to a "
            "nullable DateTimeField, or update the rows with Django instead."
        )
