"""The states in which an operator finds rows, claimed or given up on, and what tells a change.

A function returns no rows, without a query, where none can be in the state, and raises
``NotRecordedError`` where rows may be, but no column shows it.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

from django.db.models import BooleanField, Case, Exists, OuterRef, Q, QuerySet, Value, When

from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question
from dcl_processor.report.values import constants_of

#: Seconds after which a claim that is not settled counts as in doubt, for each row that is claimed
#: with it: the last one waits for the others.
DOUBT_AFTER = 60.0


class NotRecordedError(Exception):
    """No column shows what was asked; the message names the option that would."""


def is_pending(question: Question[Any]) -> Q:
    """Recognise a row that is in ``pending``."""
    rows = question.unfiltered.using(question.using).order_by()
    # For each row by its key. For "pk IN (…)" beside another condition PostgreSQL reads all that
    # are pending, and does so for each row where they are too many for its memory.
    return Q(Exists(rows.filter(pk=OuterRef("pk"))))


def flag(condition: Q) -> Case:
    """Return whether a row meets the condition, as a column of a read."""
    return Case(
        When(condition, then=Value(True)), default=Value(False), output_field=BooleanField()
    )


def is_timeless(processor: Definition[Any]) -> bool:
    """Return whether no column tells a row that is claimed from one that was settled since."""
    return processor.claimed_at is None and processor.lease is None


def claimed(processor: Definition[Any]) -> Q:
    """Recognise a claimed row by the constants that the claim wrote, and by its time."""
    # A settled row may still contain the claim's constants, but neither the time of the claim nor
    # a lease; one that was put back may have a lease that was taken away.
    since = {f"{processor.claimed_at}__isnull": False} if processor.claimed_at else {}
    leased = Q(**{f"{processor.lease.field}__isnull": False}) if processor.lease else Q()
    return Q(**constants_of(processor.claim or {}), **since) & leased


def default_age(processor: Definition[Any]) -> float:
    """Return the seconds after which a claim counts as in doubt: one minute for each row of it.

    The rows of a claim are handled one after another, and none of them shows whether its handler
    has started. Nothing records how long handlers take.
    """
    return DOUBT_AFTER * processor.batch_size


def unsettled(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that is not done: it is pending, claimed, or given up on."""
    found = is_pending(question) | is_given_up(processor, question)
    return found if is_timeless(processor) else found | claimed(processor)


def is_given_up(processor: Definition[Any], question: Question[Any]) -> Q:
    """Recognise a row that was given up on; no row, if no column shows it."""
    try:
        dead = given_up(processor, question)
    except NotRecordedError:
        return Q(pk__in=[])
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
        found = _used_up(processor, question)
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


def _used_up(processor: Definition[Any], question: Question[Any]) -> QuerySet[Any, Any]:
    """Return the pending rows that have no attempts left, and get no dead letter."""
    left = has_attempts_left(processor, question)
    if left is None:
        return question.table.none()  # each failed row is tried again
    return question.table.filter(~left, is_pending(question))


def has_attempts_left(processor: Definition[Any], question: Question[Any]) -> Q | None:
    return processor.retry.has_attempts_left(question.model) if processor.retry else None


# --- the rows that an operator chose, each with a short text by which a change of it is noticed


#: Bytes of a digest, which are 8 characters, and what follows if the row was pending.
_DIGEST, _WAS_PENDING = 6, "+"


def digest(marks: Sequence[Any], *, is_pending: bool) -> str:
    """Return a text for the texts of columns, the same in each process while they are the same."""
    known = repr(marks).encode("utf-8", "surrogatepass")
    short = urlsafe_b64encode(blake2b(known, digest_size=_DIGEST).digest()).decode()
    return short + (_WAS_PENDING if is_pending else "")


def is_same(before: str, now: str) -> bool:
    """Return whether a row with these two digests is as it was.

    A row that was pending has to be pending still: of a flip that is a function, no column is
    known. A row that was not may be so since, because its time has come.
    """
    return now in (before, before + _WAS_PENDING)


#: In the text of an object that has none of its own, and whose address differs in each process.
_ADDRESS = " at 0x"


def plain(field: Any, value: Any) -> str | None:
    """Return a column's value as a text that is the same in each process; ``None`` without one."""
    if value is None or isinstance(value, str):
        return value
    row = SimpleNamespace(**{field.attname: value})
    # As it is serialised first: what is for the database may be encrypted, each time otherwise.
    for form, given in ((field.value_to_string, row), (field.get_prep_value, value)):
        # A field of the user's own may refuse in any way.
        with suppress(Exception):
            if _ADDRESS not in (text := repr(form(given))):
                return text
    return None
