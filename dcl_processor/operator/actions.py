"""What an operator does with rows that are in doubt, or were given up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.db.models import Model, Q, QuerySet

from dcl_processor.engine.bookkeeping import with_cleared_retry
from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator.states import (
    claimed,
    default_age,
    is_given_up,
    is_pending,
    is_timeless,
    unsettled,
)
from dcl_processor.operator.writes import LOCKED, Need, Write, Written
from dcl_processor.options.kinds import Delivery
from dcl_processor.options.model_columns import check_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, ask
from dcl_processor.report.dry_run import MOST_COUNTED, counted
from dcl_processor.report.outcomes import Discard
from dcl_processor.report.values import TEN_YEARS, Values, as_timedelta, expect_seconds

logger = logging.getLogger("dcl_processor")

#: Keys that are shown of rows that an action leaves.
SHOWN = 5

#: Seconds for which the write waits for a lock that is not passed over, such as one of the table.
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


def may_be_at_work(processor: Definition[Any]) -> Iterator[Need]:
    """Yield that a claim without a lease is old enough for its worker to be gone."""
    if processor.lease is None and processor.claimed_at is not None:
        age = default_age(processor)
        why = f"claimed less than {age:g} s ago: a worker may be at work; use force"
        since = DatabaseNow() - as_timedelta(age)
        yield why, ~Q(claimed(processor), **{f"{processor.claimed_at}__gt": since})


def to_mark_done(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    values: Values | None = None,
    *,
    force: bool = False,
) -> Write:
    """Return what ``mark_done()`` writes, and to which rows; ``force``: to all without a lease."""
    question = _check_rows(processor, rows, "mark_done")
    flip = _values(processor, "mark_done", "done", values, question.model)
    done = with_cleared_retry(processor, flip)
    _refuse_timeless(processor, "mark_done")
    stuck = is_given_up(processor, question)
    if processor.claim is not None:
        stuck |= claimed(processor)
    needs = () if force else (("neither claimed nor given up", stuck),)
    return Write(processor, question, rows, "mark_done", needs, done, is_checked=values is None)


def to_requeue(
    processor: Definition[Any], rows: QuerySet[Any, Any], *, force: bool = False
) -> Write:
    """Return what ``requeue()`` writes, and to which rows."""
    put_back = values_to_put_back(processor)
    if put_back is None:
        raise InvalidOption(
            f"{processor.name}: expected reset=… for requeue(), got a processor without reset; set "
            "it to the values that put a row back into pending."
        )
    question = _check_rows(processor, rows, "requeue")
    reset = with_cleared_retry(processor, put_back)
    needs: list[Need] = []
    if processor.reset is None:
        needs.append(("not in pending: set reset=… to put it back", is_pending(question)))
    if not force:
        # Race: double claim. Under its lock, because a worker may have settled the row meanwhile:
        # a paid charge that is put back is paid twice, and so is one that is being paid now.
        why = "done, or not waiting yet; force puts it back, and repeats its effect"
        needs = [*may_be_at_work(processor), (why, unsettled(processor, question))]
    return Write(processor, question, rows, "requeue", needs, reset)


def values_to_put_back(processor: Definition[Any]) -> Values | None:
    """Return what puts a row back into ``pending``, apart from its retry; ``None``: not known.

    Of a row that nothing but ``done`` takes out of ``pending``, only the attempts are cleared.
    """
    if processor.reset is not None or processor.retry is None:
        return processor.reset
    leaves = (
        processor.claim or processor.delivery == Delivery.AT_MOST_ONCE or processor._has_dead_letter
    )
    return None if leaves else {}


def to_discard(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    reason: str = "",
    values: Values | None = None,
) -> Write:
    """Return what ``discard()`` writes, and to which rows."""
    question = _check_rows(processor, rows, "discard")
    dead_letter = _values(processor, "discard", "failed", values, question.model)
    _refuse_timeless(processor, "discard")
    retry = processor.retry
    if retry is not None:
        noted = retry.given_up(Discard(reason), 0, question.model)
        # No attempt was made, so their number stays.
        noted.pop(retry.attempts, None)
        dead_letter = {**noted, **dead_letter}
    waits = is_pending(question)
    if processor.claim is not None:
        waits |= claimed(processor)
    needs = (("neither pending nor claimed", waits),)
    return Write(
        processor, question, rows, "discard", needs, dead_letter, is_checked=values is None
    )


def act(write: Write) -> int:
    """Write to the rows that meet the needs, and warn of the others; return how many were."""
    choice, written = write.choose(most_left=SHOWN), Written()
    for why, number in choice.numbers.items():
        _warn(write, number, choice.left[why], why)
    write.to_free(choice.rows, written, seconds=LOCKED_FOR)
    for error in written.failed.values():
        raise error
    _warn(write, len(written.locked), written.locked[:SHOWN], LOCKED)
    return len(written.written)


def _warn(write: Write, number: int, some: Sequence[Any], why: str) -> None:
    if number:
        more = ", …" if number > len(some) else ""
        logger.warning(
            "%s: %s() leaves %d %s as %s (%s%s): %s.",
            *(write.processor.name, write.method, number, "row" if number == 1 else "rows"),
            *("it is" if number == 1 else "they are", ", ".join(map(repr, some)), more, why),
        )


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
    return ask(processor.pending, label=processor.name, using=processor.using).table


def _refuse_timeless(processor: Definition[Any], method: str) -> None:
    """Raise unless a column distinguishes a claimed row from one that is settled."""
    if processor.claim is not None and is_timeless(processor):
        raise InvalidOption(
            f"{processor.name}: expected claimed_at=… for {method}(), which tells a handled row "
            "from a claimed one, got a claim without it; set it to a nullable DateTimeField, or "
            "update the rows with Django instead."
        )
