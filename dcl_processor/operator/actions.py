"""What an operator does with rows that are in doubt, or were given up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.db.models import Model, Q, QuerySet

from dcl_processor.engine.bookkeeping import with_cleared_retry
from dcl_processor.exceptions import InvalidOption
from dcl_processor.operator import states
from dcl_processor.operator.states import claimed, default_age, is_pending
from dcl_processor.operator.writes import LOCKED, Need, Write, Written
from dcl_processor.options.kinds import Delivery
from dcl_processor.options.model_columns import check_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question, ask
from dcl_processor.report.dry_run import MOST_COUNTED, counted
from dcl_processor.report.outcomes import Discard
from dcl_processor.report.values import Values

logger = logging.getLogger("dcl_processor")

#: Keys that are shown of rows that an action leaves.
SHOWN = 5

#: Seconds for which the write waits for a lock that is not passed over, such as one of the table.
LOCKED_FOR = 10.0


def in_doubt(processor: Definition[Any], older_than: float | timedelta) -> QuerySet[Any, Any]:
    """Return the rows that have been claimed for longer than ``older_than``, the oldest first."""
    doubtful, since = states.is_in_doubt(processor, older_than), processor.claimed_at or "pk"
    return _question(processor).table.filter(doubtful).order_by(since, "pk")


def in_progress(processor: Definition[Any]) -> QuerySet[Any, Any]:
    """Return the rows that a worker has claimed or leased, the longest-held first."""
    held = states.is_in_progress(processor)
    since = processor.claimed_at or (processor.lease.field if processor.lease else "pk")
    return _question(processor).table.filter(held).order_by(since, "pk")


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


# --- what is written


def to_mark_done(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    values: Values | None = None,
    *,
    force: bool = False,
) -> Write:
    """Return what ``mark_done()`` writes, and to which rows; ``force``: to all without a lease."""
    question = _question_of(processor, rows, "mark_done")
    flip = _values(processor, "mark_done", "done", values, question.model)
    _refuse_timeless(processor, "mark_done")
    stuck = states.is_given_up(processor, question) | _held(processor, question)
    needs = (
        []
        if force
        else [*may_be_at_work(processor, question), ("neither claimed nor given up", stuck)]
    )
    done = with_cleared_retry(processor, flip)
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
    question = _question_of(processor, rows, "requeue")
    needs: list[Need] = []
    if processor.reset is None:
        needs.append(("not in pending: set reset=… to put it back", is_pending(question)))
    if not force:
        # Race: double claim. Under its lock, because a worker may have settled the row meanwhile:
        # a paid charge that is put back is paid twice, and so is one that is being paid now.
        why = "done, or not waiting yet; force puts it back, and repeats its effect"
        needs += [
            *may_be_at_work(processor, question),
            (why, states.unsettled(processor, question)),
        ]
    reset = with_cleared_retry(processor, put_back)
    return Write(processor, question, rows, "requeue", needs, reset)


def to_discard(
    processor: Definition[Any],
    rows: QuerySet[Any, Any],
    reason: str = "",
    values: Values | None = None,
    *,
    force: bool = False,
) -> Write:
    """Return what ``discard()`` writes, and to which rows."""
    question = _question_of(processor, rows, "discard")
    dead_letter = _values(processor, "discard", "failed", values, question.model)
    _refuse_timeless(processor, "discard")
    retry = processor.retry
    if retry is not None:
        noted = retry.given_up(Discard(reason), 0, question.model)
        noted.pop(retry.attempts, None)  # no attempt was made
        dead_letter = {**noted, **dead_letter}
    waits = is_pending(question) | _held(processor, question)
    needs = [
        *([] if force else may_be_at_work(processor, question)),
        ("neither pending nor claimed", waits),
    ]
    return Write(
        processor, question, rows, "discard", needs, dead_letter, is_checked=values is None
    )


def values_to_put_back(processor: Definition[Any]) -> Values | None:
    """Return what puts a row back into ``pending``, apart from its retry; ``None``: not known.

    Of a row that nothing but ``done`` takes out of ``pending``, only the attempts are cleared.
    """
    if processor.reset is not None or processor.retry is None:
        return processor.reset
    is_hidden = processor.claim is not None or processor.delivery == Delivery.AT_MOST_ONCE
    return None if is_hidden or processor._has_dead_letter else {}


def may_be_at_work(processor: Definition[Any], question: Question[Any]) -> list[Need]:
    """Return the need that a claim without a lease is old enough for its worker to be gone."""
    young, age = states.is_young(processor, question), default_age(processor)
    why = f"claimed less than {age:g} s ago: a worker may be at work; use force"
    return [] if young is states.NONE else [(why, ~young)]


def act(write: Write) -> int:
    """Write to the rows that meet the needs, and warn of the others; return how many were."""
    choice, written = write.choose(), Written()
    for why, pks in choice.left.items():
        _warn(write, pks, why)
    write.to_free(choice.rows, written, seconds=LOCKED_FOR)
    for error in written.failed.values():
        raise error
    if written.locked:
        _warn(write, written.locked, LOCKED)
    return len(written.written)


def _warn(write: Write, pks: Sequence[Any], why: str) -> None:
    number, more = len(pks), ", …" if len(pks) > SHOWN else ""
    logger.warning(
        "%s: %s() leaves %d %s as %s (%s%s): %s.",
        *(write.processor.name, write.method, number, "row" if number == 1 else "rows"),
        *("it is" if number == 1 else "they are", ", ".join(map(repr, pks[:SHOWN])), more, why),
    )


def _held(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that a claim keeps from being handled."""
    unleased = states.is_unleased(processor, question)
    return unleased if processor.claim is None else claimed(processor) | unleased


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


def _question_of(processor: Definition[Any], rows: Any, method: str) -> Question[Any]:
    """Return the question on the rows' alias; refuse rows that are not the processor's."""
    question = _question(processor)
    model = question.model
    ours = isinstance(rows, QuerySet) and rows.model._meta.concrete_model is model
    if not ours or rows.query.is_sliced:
        kind = f"a queryset of {rows.model._meta.label}" if isinstance(rows, QuerySet) else ""
        got = kind or (repr(rows) if isinstance(rows, Model) else f"a {type(rows).__name__}")
        raise InvalidOption(
            f"{processor.name}: expected {method}() to take a queryset of {model._meta.label} "
            f"without a slice, got {'a slice' if ours else got}; for one row write "
            "…objects.filter(pk=…)."
        )
    named: Any = rows
    chosen = named._db  # noqa: SLF001  # .db would ask the router
    return replace(question, using=chosen or question.using)


def _question(processor: Definition[Any]) -> Question[Any]:
    return ask(processor.pending, label=processor.name, using=processor.using)


def _refuse_timeless(processor: Definition[Any], method: str) -> None:
    """Raise unless a column distinguishes a claimed row from one that is settled."""
    if processor.claim is not None and states.is_timeless(processor):
        raise InvalidOption(
            f"{processor.name}: expected claimed_at=… for {method}(), which tells a handled row "
            "from a claimed one, got a claim without it; set it to a nullable DateTimeField, or "
            "update the rows with Django instead."
        )
