"""The states of a row as conditions on its processor's model.

A function returns a condition of no row where none can be in the state, and raises
``NotRecordedError`` where rows may be, but no column shows it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import BooleanField, Case, Exists, OuterRef, Q, QuerySet, Value, When

from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.report.values import as_timedelta, constants_of

#: Seconds after which a claim that is not settled counts as in doubt, for each row that is claimed
#: with it: the last one waits for the others.
DOUBT_AFTER = 60.0

#: The condition of no row.
NONE = Q(pk__in=[])


class NotRecordedError(Exception):
    """No column shows what was asked; the message names the option that would."""


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
    rows = question.unfiltered.using(question.using).order_by()
    return Q(Exists(rows.filter(pk=OuterRef("pk"))))


def is_later(processor: Definition[Any]) -> Q:
    """Recognise, of the pending rows, one whose next attempt is to come."""
    at = processor.retry.next_attempt_at if processor.retry else None
    return NONE if at is None else Q(**{f"{at}__gt": DatabaseNow()})


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


# --- settled, or not


def unsettled(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that is not done: it is pending, claimed, or given up on."""
    found = is_pending(question) | is_given_up(processor, question)
    found |= is_unleased(processor, question)
    return found if is_timeless(processor) else found | claimed(processor)


def is_given_up(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that was given up on; no row, if no column shows it."""
    try:
        dead = given_up(processor, question)
    except NotRecordedError:
        return NONE
    # By the row's key, as is_pending() does.
    return Q(Exists(dead.order_by().filter(pk=OuterRef("pk"))))


def given_up(processor: Definition[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the rows that failed for good, or were discarded.

    Such a row has the dead letter. Without one it is still pending, and has used up its attempts.
    A row that was settled since, or that a worker has claimed, is neither.
    """
    if processor._has_dead_letter:
        found = _with_dead_letter(processor, question)
    else:
        left = has_attempts_left(processor, question)
        found = question.table.filter(NONE if left is None else ~left & is_pending(question))
    if processor.lease is not None:
        return found.filter(processor.lease.free())
    # Without a time, a row that was given up on may still contain the claim's constants.
    return found.exclude(claimed(processor)) if _has_times_of_claims(processor) else found


def _with_dead_letter(processor: Definition[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the rows that contain the constants of ``failed``, and not those of ``done``."""
    failed, done = constants_of(processor.failed or {}), constants_of(processor.done or {})
    if not failed or failed == done:
        raise NotRecordedError("set failed={…} with a constant that done does not write")
    found = question.table.filter(**failed)
    # A row that was put back and handled may still contain the dead letter.
    return found if done.items() <= failed.items() else found.exclude(**done)
