"""What identifies the hold of a row that was handed out, as far as the row shows it.

It fits in a token, from which another process makes the batch of this row again.

The lease token identifies the hand-out: the value of the lease column, or of ``claimed_at``. A
renewal changes the lease, and its answer may be lost. So renewals are whole steps: a lease that
began as ``t0`` is ``t0 + n * duration``, and every such value is recognised as that of this hold.
Another claim's lease can equal one of these values by chance. The probability is 1 / (the duration
in microseconds; on SQLite, in milliseconds). If attempts are counted, the attempt number has to be
equal, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django.core import signing
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Model

from dcl_processor.candidates.question import Question
from dcl_processor.clock import DatabaseNow, recognisable
from dcl_processor.definition.kinds import was_taken_away
from dcl_processor.engine.settlement import Batch, Claimed, Held, Marked, Wanted, mark_of
from dcl_processor.engine.work import read_attempts
from dcl_processor.exceptions import InvalidToken, LostBecause
from dcl_processor.settlement import writing
from dcl_processor.values import constants_of

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class HandOut:
    """Identifies one hand-out of a row.

    ``using``: the alias; ``since``: the time that the claim wrote, in microseconds since 1970;
    ``duration``: of the lease, in microseconds; ``None``: it is a claim, which never lapses.
    ``attempts``: the number that the claim counted, if it did.
    """

    using: str
    pk: Any
    since: int
    duration: int | None
    attempts: int | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a row contains now.

    ``time``: of the lease or the claim; ``now``: the database's clock.
    """

    time: datetime | None
    now: datetime
    attempts: int | None


def hold_of(processor: Definition[Any], batch: Batch, held: Held) -> HandOut:
    """Return the hold of a row that the batch has just marked."""
    mark, after = batch.mark, held.marked.after
    assert mark is not None
    assert mark.time is not None
    duration = None
    if mark.lease is not None:
        duration = timedelta(seconds=mark.lease.seconds) // _MICROSECOND
    counter = _counter(processor)
    attempts = after[counter] if counter and mark.lease is not None else None
    return HandOut(batch.question.using, held.pk, _stamp(after[mark.time]), duration, attempts)


def look(processor: Definition[Any], question: Question[Any], hold: HandOut) -> Found | None:
    """Return what the row contains; ``None`` if it is gone, or lacks the claim's constants."""
    counter = _counter(processor)
    rows = question.table.filter(pk=hold.pk, **_constants(processor))
    columns = [_time(processor), *([counter] if counter else [])]
    asked = rows.annotate(_database_now=DatabaseNow()).order_by()
    for now, time, *attempts in asked.values_list("_database_now", *columns):
        using = question.using
        return Found(
            recognisable(time, using), recognisable(now, using), attempts[0] if attempts else None
        )
    return None


def is_held(hold: HandOut, found: Found | None) -> bool:
    """Return whether the row is still that of the hold, be its lease alive or not."""
    if found is None or found.time is None:
        return False
    passed = _stamp(found.time) - hold.since
    if hold.duration is None:
        return passed == 0
    if was_taken_away(found.time):
        return False
    if None not in (hold.attempts, found.attempts) and hold.attempts != found.attempts:
        return False
    return passed % hold.duration == 0


def why_lost(processor: Definition[Any], question: Question[Any], hold: HandOut) -> LostBecause:
    """Look up why the row is no longer that of the hold."""
    rows = question.table.filter(pk=hold.pk).values_list(_time(processor), flat=True)
    for found in rows:
        time = recognisable(found, question.using)
        is_lease = processor.lease is not None
        if found is not None and (
            not was_taken_away(time) if is_lease else _stamp(time) != hold.since
        ):
            return "taken_over"
        return "lapsed" if question.still_pending([hold.pk]).exists() else "settled"
    return "gone"


def batch_of(
    processor: Definition[Any], question: Question[Any], hold: HandOut, row: Any, found: Found
) -> Batch:
    """Return the batch of a row that is held, as after its claim."""
    mark = mark_of(processor, question.model, is_held=True)
    assert mark.time is not None
    held = Held(hold.pk, row)
    read_attempts(processor, question, [held])
    # A claim that is no lease counts no attempt: its failure does.
    held.attempt, held.refused = (found.attempts or 0) + (processor.lease is None), None
    after = {mark.time: found.time, **_constants(processor)}
    held.marked = Marked(before=mark.undone or {}, after=after)
    claimed = Claimed([held])
    return Batch(question, Wanted([hold.pk]), claimed=claimed, mark=mark, is_marked=True)


def renew(
    processor: Definition[Any], question: Question[Any], hold: HandOut, found: Found
) -> datetime | None:
    """Renew the lease by whole steps; return its new end, or ``None`` if it changed meanwhile.

    It ends at least one duration from now, and at most two.
    """
    assert hold.duration is not None
    assert found.time is not None
    wanted = _stamp(found.now) + hold.duration - _stamp(found.time)
    steps = -(-wanted // hold.duration)
    if steps <= 0:
        return found.time
    end = found.time + steps * hold.duration * _MICROSECOND
    time = _time(processor)
    # Race: lost lease that writes. Another worker may have taken the row over since it was read.
    written = writing.compare_and_set(question, hold.pk, {time: [found.time]}, {time: end})
    return end if written else None


def deferred(processor: Definition[Any]) -> list[str]:
    """Return the columns that change while a row is handed out."""
    return [] if processor.lease is None else [processor.lease.field]


def _counter(processor: Definition[Any]) -> str | None:
    """Return the column that counts attempts, if there is one."""
    return None if processor.retry is None else processor.retry.attempts


def _time(processor: Definition[Any]) -> str:
    """Return the column by whose value a held row is recognised."""
    time = processor.lease.field if processor.lease else processor.claimed_at
    assert time is not None
    return time


def _constants(processor: Definition[Any]) -> dict[str, Any]:
    """Return the other values by which a claim is recognised; a lease needs none."""
    return {} if processor.lease else constants_of(processor.claim or {})


def _stamp(time: datetime) -> int:
    """Return the microseconds since 1970, in the zone that the database's columns are in."""
    epoch = datetime(1970, 1, 1, tzinfo=None if time.tzinfo is None else UTC)
    return (time - epoch) // _MICROSECOND


# --- the token of a reservation: what identifies the hold of a row, signed
#
# It contains no data of the row, and is readable: its signature proves that this site gave it out.
# The salt contains the processor's name, and ``bound_to``, so that the tokens of another processor,
# and those that were given to another agent, are not valid. There is no time limit besides the
# lease.


#: The version of the contents.
VERSION = 1


def sign(
    processor: Definition[Any], model: type[Model], hold: HandOut, bound_to: str | None
) -> str:
    """Return the token of a hold."""
    pk: Any = model._meta.pk
    text = pk.value_to_string(SimpleNamespace(**{pk.attname: hold.pk}))
    contents = [VERSION, hold.using, text, hold.since, hold.duration, hold.attempts]
    return signing.dumps(contents, salt=_salt(processor, bound_to))


def unsign(processor: Definition[Any], token: Any, bound_to: str | None) -> HandOut:
    """Return the hold of a token, its key still as a text; raises ``InvalidToken``."""
    try:
        version, *contents = signing.loads(token, salt=_salt(processor, bound_to))
    except (signing.BadSignature, TypeError) as error:  # the latter of what is no text
        raise _invalid(processor, "one that was changed, or given out elsewhere") from error
    if version != VERSION or (contents[3] is None) != (processor.lease is None):
        raise _invalid(processor, "one of another version of the processor")
    hold = HandOut(*contents)
    if hold.using not in connections.databases:
        raise _invalid(processor, f"one of a database {hold.using!r} that is not in DATABASES")
    return hold


def of_model(processor: Definition[Any], model: type[Model], hold: HandOut) -> HandOut:
    """Return the hold of a token with its key; raises ``InvalidToken``."""
    try:
        found = model._meta.pk.to_python(hold.pk)
    except (ValidationError, ValueError, TypeError) as error:
        raise _invalid(
            processor, f"one whose key {hold.pk!r:.100} is no key of the model"
        ) from error
    return replace(hold, pk=tuple(found) if isinstance(found, list) else found)


def _salt(processor: Definition[Any], bound_to: str | None) -> str:
    bound = "" if bound_to is None else f"\0{bound_to}"
    return f"dcl_processor.reservation:{processor.name}{bound}"


def _invalid(processor: Definition[Any], got: str) -> InvalidToken:
    return InvalidToken(
        f"{processor.name}: expected a token that reserve() gave out for this processor and this "
        f"bound_to, got {got}; reserve another row."
    )
