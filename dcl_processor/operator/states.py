"""The states of a row as conditions on its processor's model.

A function returns a condition of no row where none can be in the state, and raises
``NotRecordedError`` where rows may be, but no column shows it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import BooleanField, Case, Exists, OuterRef, Q, QuerySet, Value, When

from dcl_processor.exceptions import InvalidOption
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.report.values import TEN_YEARS, as_timedelta, constants_of, expect_seconds

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


# --- pending


def is_pending(question: Question[Any]) -> Q:
    """Recognise a row that is in ``pending``."""
    rows = question.unfiltered.using(question.using).order_by()
    # For each row by its key. For "pk IN (…)" beside another condition PostgreSQL reads all that
    # are pending, and does so for each row where they are too many for its memory.
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


def is_in_doubt(processor: Definition[Any], older_than: float | timedelta) -> Q:
    """Recognise a row that has been claimed for longer than that; raises ``InvalidOption``."""
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
    return claimed(processor) & _claimed_for(processor, older_than)


def is_in_progress(processor: Definition[Any]) -> Q:
    """Recognise a row that a worker has claimed or leased; raises ``InvalidOption``."""
    if processor.lease is not None:
        return claimed(processor) & processor.lease.alive()
    if processor.claim is None or processor.claimed_at is None:
        raise InvalidOption(
            f"{processor.name}: expected a lease, or claim=… and claimed_at=…, for in_progress(), "
            "got a processor without both; add them, so that each row shows that it is claimed."
        )
    return claimed(processor)


def is_young(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row with a claim that is not old enough for its worker to be gone."""
    if processor.claim is None or processor.claimed_at is None or processor.lease is not None:
        return NONE
    young = claimed(processor) & ~_claimed_for(processor, default_age(processor))
    # Of a row without attempts left the last failure was recorded.
    return young & (has_attempts_left(processor, question) or Q())


def _claimed_for(processor: Definition[Any], age: float | timedelta) -> Q:
    return Q(**{f"{processor.claimed_at}__lte": DatabaseNow() - as_timedelta(age)})


def is_unleased(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row with a claim's mark that has no lease, and that no worker would take.

    A loop without leases, such as one that was there before, has left it.
    """
    mark, done = constants_of(processor.claim or {}), processor.done or {}
    if processor.lease is None or not mark or not processor._has_fixed_flip:
        return NONE
    # A settled row may still contain the mark.
    settled = {} if mark.keys() & done.keys() else constants_of(done)
    if not (mark.keys() & done.keys() or settled):
        return NONE
    found = Q(**mark, **{f"{processor.lease.field}__isnull": True})
    found &= ~(is_pending(question) | is_given_up(processor, question))
    return found & ~Q(**settled) if settled else found


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
    if constants_of(processor.failed or {}):
        found = _with_dead_letter(processor, question)
    elif processor._has_dead_letter:
        raise NotRecordedError("set failed={…} with a constant that done does not write")
    else:
        left = has_attempts_left(processor, question)
        used_up = NONE if left is None else ~left & is_pending(question)
        found = question.table.none() if left is None else question.table.filter(used_up)
    if processor.lease is not None:
        return found.filter(processor.lease.free())
    # Without a time, a row that was given up on may still contain the claim's constants.
    has_time = processor.claim is not None and processor.claimed_at is not None
    return found.exclude(claimed(processor)) if has_time else found


def _with_dead_letter(processor: Definition[Any], question: Question[Any]) -> QuerySet[Any, Any]:
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
