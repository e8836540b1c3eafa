"""The states of a row, as conditions on its processor's model, and the rows that are in one.

A function returns a condition of no row where none can be in the state, and raises
``NotRecordedError`` where rows may be, but no column shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models import (
    BooleanField,
    Case,
    Count,
    Exists,
    F,
    Model,
    OuterRef,
    Q,
    QuerySet,
    Value,
    When,
    Window,
)
from django.db.models.functions import RowNumber

from dcl_processor.engine import limits
from dcl_processor.keys.claim import in_order
from dcl_processor.keys.columns import column_of, mark_of
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, ask
from dcl_processor.report.values import as_timedelta, constants_of

#: The states that rows are counted, shown and filtered by.
STATES = ("pending", "due", "held", "later", "in_progress", "in_doubt", "given_up")

#: Seconds after which a claim that is not settled counts as in doubt, for each row that is claimed
#: with it: the last one waits for the others.
DOUBT_AFTER = 60.0

#: The condition of no row.
NONE = Q(pk__in=[])


class NotRecordedError(Exception):
    """No column shows what was asked; the message names the option that would."""


def question_of(
    processor: Definition[Any],
    using: str | None = None,
    due: Callable[[type[Model]], Q | None] | None = None,
) -> Question[Any]:
    """Return the processor's question, as ``run()`` would ask it; raises the same errors.

    ``due``: the condition for a row that may be tried now, as for ``ask()``; without it, all
    pending rows are in question.
    """
    alias = using or processor.using
    limits.check_alias(alias)
    return ask(processor.pending, label=processor.name, using=alias, due=due)


def in_state(
    name: str, processor: Definition[Any], question: Question[Any], doubt_after: float | None = None
) -> QuerySet[Any, Any]:
    """Return the rows that are in one of ``STATES``: none, without a query, if none can be.

    ``doubt_after``: seconds after which a claim is in doubt, at least ``default_age()``: a worker
    may be at work on a younger one, and no action takes it.
    """
    pending, is_due = question.queryset, processor._due(question.model) or Q()
    age = max(default_age(processor), doubt_after or 0.0)
    match name:
        case "pending":
            return pending
        case "due":  # what a run would try now, if no session has it locked
            return pending.filter(is_due, ~is_held(processor, question))
        case "held":
            return pending.filter(is_due, is_held(processor, question))
        case "later":
            return pending.filter(is_later(processor))
        case "given_up":
            return question.table.filter(given_up(processor, question))
        case "in_progress":
            return question.table.filter(is_in_progress(processor, question, age))
        case _:
            return question.table.filter(is_in_doubt(processor, question, age))


def flag(condition: Q) -> Case:
    """Return whether a row meets the condition, as a column of a read."""
    return Case(
        When(condition, then=Value(True)), default=Value(False), output_field=BooleanField()
    )


def default_age(processor: Definition[Any]) -> float:
    """Return the seconds after which a claim counts as in doubt: one minute for each row of it.

    The rows of a claim are handled one after another, and none of them shows whether its handler
    has started. Nothing records how long handlers take.
    """
    return DOUBT_AFTER * processor.batch_size


def is_timeless(processor: Definition[Any]) -> bool:
    """Return whether no column tells a row that is claimed from one that was settled since."""
    return processor.claimed_at is None and processor.lease is None


def _has_times_of_claims(processor: Definition[Any]) -> bool:
    """Return whether a row shows for how long it has been claimed; a lease shows its end alone."""
    return processor.lease is None and None not in (processor.claim, processor.claimed_at)


# --- pending


def is_pending(question: Question[Any]) -> Q:
    """Recognise a row that is in ``pending``."""
    # For each row by its key. For "pk IN (…)" beside another condition PostgreSQL reads all that
    # are pending, and does so for each row where they are too many for its memory.
    return Q(Exists(question.unfiltered.order_by().filter(pk=OuterRef("pk"))))


def is_later(processor: Definition[Any]) -> Q:
    """Recognise, of the pending rows, one whose next attempt is to come."""
    at = processor.retry.next_attempt_at if processor.retry else None
    return NONE if at is None else Q(**{f"{at}__gt": DatabaseNow()})


def is_held(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise, of the pending rows, one that waits for its key: no run starts it now.

    The key has no place left, or its first row cannot be tried now. Its places are taken by rows at
    work or in doubt, as far as columns show them.
    """
    if processor.group_by is None:
        return NONE
    column, mark = column_of(processor, "group_by", question.model), mark_of(processor)
    found, has_key = NONE, {f"{column}__isnull": False}
    if mark is not None:
        at_work = question.table.filter(mark.in_flight, ~(mark.lapsed or NONE), **has_key)
        rows = at_work.order_by().values(column).annotate(dcl_rows=Count("pk"))
        full = rows.filter(dcl_rows__gte=processor.most_of_a_key)
        found |= Q(**{f"{column}__in": full.values(column)})
    due = processor._due(question.model)
    if processor.in_order and due is not None:
        pending = question.unfiltered.annotate(dcl_due=flag(due))
        order: Any = in_order(pending).query.order_by
        # Of the keys that have a row that waits, which is the first: by one sort of their rows.
        keys = pending.order_by().filter(dcl_due=False, **has_key)
        rows = pending.order_by().filter(**{f"{column}__in": keys.values(column)})
        place = Window(RowNumber(), partition_by=[F(column)], order_by=[*order])
        first = rows.annotate(dcl_place=place).filter(dcl_place=1, dcl_due=False)
        found |= Q(**{f"{column}__in": first.values(column)})
    # A row that has lost its worker had its place once, and is taken over by the next run.
    return found & ~mark.in_flight if mark is not None else found


def has_attempts_left(processor: Definition[Any], question: Question[Any]) -> Q | None:
    """Recognise, of the pending rows, one that has attempts left; ``None``: each one has."""
    return processor.retry.has_attempts_left(question.model) if processor.retry else None


# --- claimed


def claimed(processor: Definition[Any]) -> Q:
    """Recognise a claimed row by the constants that the claim wrote, and by its time or lease."""
    # A settled row may still contain the claim's constants, but neither of these.
    times = [processor.claimed_at, processor.lease.field if processor.lease else None]
    known = {f"{name}__isnull": False for name in times if name}
    return Q(**constants_of(processor.claim or {}), **known)


def is_claimed(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that a claim keeps from being handled, however old; not if none shows it."""
    unleased = is_unleased(processor, question)
    return unleased if is_timeless(processor) else claimed(processor) | unleased


def is_in_progress(processor: Definition[Any], question: Question[Any], age: float) -> Q:
    """Recognise a row that a worker has leased, or has claimed for less than ``age`` seconds."""
    if processor.is_transactional:
        raise NotRecordedError("a TRANSACTIONAL worker only locks its row")
    if processor.lease is not None:
        return claimed(processor) & processor.lease.alive()
    return claimed(processor) & ~is_in_doubt(processor, question, age)


def is_in_doubt(processor: Definition[Any], question: Question[Any], age: float | timedelta) -> Q:
    """Recognise a row whose claim was never settled, and that no run takes over.

    It has been claimed for ``age`` seconds; or else it has no lease, as a loop without leases has
    left it.
    """
    if processor.is_transactional:
        return NONE
    if processor.lease is not None:
        return is_unleased(processor, question)
    if not _has_times_of_claims(processor):
        raise NotRecordedError("set claim=… and claimed_at=…")
    since = {f"{processor.claimed_at}__lte": DatabaseNow() - as_timedelta(age)}
    return claimed(processor) & Q(**since)


def is_young(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row with a claim that is not old enough for its worker to be gone."""
    if not _has_times_of_claims(processor):
        return NONE
    young = is_in_progress(processor, question, default_age(processor))
    # Of a row without attempts left the last failure was recorded.
    return young & (has_attempts_left(processor, question) or Q())


def is_unleased(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row with a claim's mark that has no lease, and that no worker would take."""
    mark, done = constants_of(processor.claim or {}), constants_of(processor.done or {})
    if processor.lease is None or not (mark and done):
        return NONE
    found = Q(**mark, **{f"{processor.lease.field}__isnull": True})
    # A settled row may still contain the mark.
    return found & ~Q(**done) & ~(is_pending(question) | is_given_up(processor, question))


# --- given up


def is_given_up(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that was given up on; no row, if no column shows it."""
    try:
        return given_up(processor, question)
    except NotRecordedError:
        return NONE


def given_up(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that failed for good, or was discarded.

    Such a row has the dead letter. Without one it is still pending, and has used up its attempts.
    A row that was settled since, or that a worker has claimed, is neither.
    """
    failed, done = constants_of(processor.failed or {}), constants_of(processor.done or {})
    if not processor._has_dead_letter:
        left = has_attempts_left(processor, question)
        found = NONE if left is None else ~left & is_pending(question)
    elif not failed or failed == done:
        raise NotRecordedError("set failed={…} with a constant that done does not write")
    else:
        # A row that was put back and handled may still contain the dead letter.
        found = Q(**failed) if done.items() <= failed.items() else Q(**failed) & ~Q(**done)
    if processor.lease is not None:
        return found & processor.lease.free()
    # Without a time, a row that was given up on may still contain the claim's constants.
    return found & ~claimed(processor) if _has_times_of_claims(processor) else found
