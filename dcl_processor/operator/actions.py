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
from dcl_processor.operator.writes import Need, Write, Written
from dcl_processor.options.kinds import Delivery
from dcl_processor.options.model_columns import check_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question, ask
from dcl_processor.report.dry_run import MOST_COUNTED, counted
from dcl_processor.report.outcomes import Discard
from dcl_processor.report.values import TEN_YEARS, Values, expect_seconds

logger = logging.getLogger("dcl_processor")

#: Keys that are shown of rows that an action leaves.
SHOWN = 5

#: Seconds that the statements of an action may take together, such as for a lock of the table.
LONGEST = 10.0


def in_doubt(processor: Definition[Any], older_than: float | timedelta) -> QuerySet[Any, Any]:
    """Return the rows that have been claimed for longer than ``older_than``, the oldest first."""
    if processor.lease is not None:
        raise InvalidOption(
            f"{processor.name}: expected a processor without a lease for in_doubt(), got "
            f"{processor.lease!r}, after which another worker takes a row over; use in_progress()."
        )
    _expect_claim(processor, "in_doubt")
    expect_seconds(f"{processor.name}: expected older_than", older_than, most=TEN_YEARS)
    question = _question(processor)
    doubtful = states.is_in_doubt(processor, question, older_than)
    return question.table.filter(doubtful).order_by(processor.claimed_at or "pk", "pk")


def in_progress(processor: Definition[Any]) -> QuerySet[Any, Any]:
    """Return the rows that a worker has claimed or leased, the longest-held first."""
    held, since, lease = claimed(processor), processor.claimed_at, processor.lease
    if lease is None:
        _expect_claim(processor, "in_progress")
    else:
        held, since = held & lease.alive(), since or lease.field
    return _question(processor).table.filter(held).order_by(since or "pk", "pk")


def _expect_claim(processor: Definition[Any], method: str) -> None:
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected claim=… and claimed_at=… for {method}(), got a processor "
            "without both; add them, so that each claim records its time."
        )


def doubts(processor: Definition[Any], using: str | None = None) -> tuple[int, str]:
    """Return how many rows are in doubt, up to 10,001, and a sentence; 0 if no column shows it."""
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
    stuck = states.is_given_up(processor, question) | _held(processor, question)
    needs = [*may_be_at_work(processor, question), ("neither claimed nor given up", stuck)]
    done = with_cleared_retry(processor, flip)
    return Write(processor, question, rows, "mark_done", [] if force else needs, done)


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
    retry = processor.retry
    if retry is not None:
        noted = retry.given_up(Discard(reason), 0, question.model)
        noted.pop(retry.attempts, None)  # no attempt was made
        dead_letter = {**noted, **dead_letter}
    needs = [] if force else may_be_at_work(processor, question)
    waits = is_pending(question) | _held(processor, question)
    needs.append(("neither pending nor claimed", waits))
    return Write(processor, question, rows, "discard", needs, dead_letter)


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
    write.to_free(choice.rows, written, seconds=LONGEST)
    for error in written.failed.values():
        raise error
    for why, pks in {**choice.left, **written.left()}.items():
        _warn(write, pks, why)
    return len(written.written)


def _warn(write: Write, pks: Sequence[Any], why: str) -> None:
    logger.warning(
        "%s: %s() left rows as they are, %d of them (%s%s): %s.",
        *(write.processor.name, write.method, len(pks)),
        *(", ".join(map(repr, pks[:SHOWN])), ", …" if len(pks) > SHOWN else "", why),
    )


def _held(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that a claim keeps from being handled."""
    unleased = states.is_unleased(processor, question)
    return unleased if processor.claim is None else claimed(processor) | unleased


def _values(
    processor: Definition[Any], method: str, option: str, values: Any, model: type[Model]
) -> Values:
    """Return the values of the option that take a row out of ``pending``, and the operator's."""
    own: Values = getattr(processor, option) or {}
    given = {} if values is None else values
    if not isinstance(given, Mapping):
        raise InvalidOption(
            f"{processor.name}: expected {method}()'s values to be a mapping of column names to "
            f"values, such as {{'sent': True}}, got {values!r}."
        )
    # A row that keeps its claim, and not the claim's time, would be in no state.
    if not own and not (given and given.keys() >= {*(processor.claim or ())}):
        raise InvalidOption(
            f"{processor.name}: expected {method}(rows, values={{…}}) where {option}=… is not a "
            f"mapping, with each column of claim, got {', '.join(given) or 'no values'}; pass the "
            "values that take a row out of pending."
        )
    if processor.claim is not None and states.is_timeless(processor):
        raise InvalidOption(
            f"{processor.name}: expected claimed_at=… for {method}(), which tells a handled row "
            "from a claimed one, got a claim without it; set it to a nullable DateTimeField, or "
            "update the rows with Django instead."
        )
    check_columns(given, model, processor.name, "values")
    return {**own, **given}


def _question_of(processor: Definition[Any], rows: Any, method: str) -> Question[Any]:
    """Return the question on the rows' alias; refuse rows that are not the processor's."""
    question = _question(processor)
    model = question.model
    ours = isinstance(rows, QuerySet) and rows.model._meta.concrete_model is model
    if not ours or rows.query.is_sliced:
        raise InvalidOption(
            f"{processor.name}: expected {method}() to take a queryset of {model._meta.label} "
            f"without a slice, got {type(rows).__name__}; for one row write …objects.filter(pk=…)."
        )
    named: Any = rows
    chosen = named._db  # noqa: SLF001  # .db would ask the router
    return replace(question, using=chosen or question.using)


def _question(processor: Definition[Any]) -> Question[Any]:
    return ask(processor.pending, label=processor.name, using=processor.using)
