"""What identifies the hold of a row that was handed out, as far as the row shows it.

The value of the lease's column, or of ``claimed_at``, identifies the hand-out. A renewal changes
the lease, and its answer may be lost. So renewals are whole steps: a lease that began as ``t0`` is
``t0 + n * duration``, and every such value is recognised as that of this hold. Another claim's
lease can equal one of these values by chance, with the probability 1 / (the duration in
microseconds); if attempts are counted, their number has to be equal, too.

The token of a reservation is the signed hold. It contains no data of the row, and is readable. Its
salt contains the processor's name and ``bound_to``, so that tokens of others are not valid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from django.core import signing
from django.core.exceptions import ValidationError
from django.db import connections
from django.db.models import Model

from dcl_processor.engine.rows import Row
from dcl_processor.exceptions import InvalidToken, LostBecause
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.report.values import Values, constants_of

_MICROSECOND = timedelta(microseconds=1)

#: The version of a token's contents.
VERSION = 1

#: Renewals that may come between the look at a row and the write to it.
RENEWALS = 3


@dataclass(frozen=True, slots=True)
class Hold:
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
    """What a row contains; ``time``: of lease or claim; ``now``: by the database's clock."""

    time: datetime
    now: datetime
    attempts: int


def column_of(processor: Definition[Any]) -> str:
    """Return the column by whose value a held row is recognised."""
    column = processor.lease.field if processor.lease else processor.claimed_at
    assert column is not None
    return column


def hold_of(processor: Definition[Any], using: str, row: Row) -> Hold:
    """Return the hold of a row that was just marked."""
    time, lease = row.expected[column_of(processor)], processor.lease
    if lease is None:
        return Hold(using, row.pk, _stamp(time), None, None)
    duration = timedelta(seconds=lease.seconds) // _MICROSECOND
    return Hold(using, row.pk, _stamp(time[0]), duration, row.attempt if processor.retry else None)


def look(processor: Definition[Any], question: Question[Any], hold: Hold) -> Found | None:
    """Return what the row contains; ``None``: it is no longer that of the hold."""
    counter = processor.retry.attempts if processor.retry else None
    asked = _held(processor, question, hold).annotate(dcl_now=DatabaseNow()).order_by()
    columns = ["dcl_now", column_of(processor), *([counter] if counter else [])]
    answers: Any = asked.values_list(*columns)
    for now, time, *attempts in answers:
        passed = 1 if time is None else _stamp(time) - hold.since
        if passed == 0 or (hold.duration is not None and time and passed % hold.duration == 0):
            number: Any = attempts[0] if attempts else 0
            since: Any = time
            return Found(since, now, number or 0)
    return None


def expected(processor: Definition[Any], hold: Hold, found: Found) -> Values:
    """Return what recognises the row in its settlement, also after renewals by the same caller."""
    time = column_of(processor)
    if processor.lease is None:
        return {time: found.time, **constants_of(processor.claim or {})}
    assert hold.duration is not None
    first, step = renewed(hold, found), hold.duration * _MICROSECOND
    times = [found.time, *(first + n * step for n in range(RENEWALS))]
    counted = processor.retry and hold.attempts is not None and processor.retry.attempts
    return {time: times, **({counted: hold.attempts} if counted else {})}


def renewed(hold: Hold, found: Found) -> datetime:
    """Return the end of a renewed lease, by whole steps: one to two durations from now."""
    assert hold.duration is not None
    wanted = _stamp(found.now) + hold.duration - _stamp(found.time)
    steps = max(-(-wanted // hold.duration), 0)
    return found.time + steps * hold.duration * _MICROSECOND


def why_lost(processor: Definition[Any], question: Question[Any], hold: Hold) -> LostBecause:
    """Look up why the row is no longer that of the hold."""
    rows = question.table.filter(pk=hold.pk).values_list(column_of(processor), flat=True)
    for time in rows:
        if time is not None and (processor.lease is not None or _stamp(time) != hold.since):
            return "taken_over"
        return "lapsed" if question.still_pending([hold.pk]).exists() else "settled"
    return "gone"


def _held(processor: Definition[Any], question: Question[Any], hold: Hold) -> Any:
    """Return the row if it has the claim's constants, or, under a lease, its attempt."""
    constants = {} if processor.lease else constants_of(processor.claim or {})
    if processor.retry is not None and hold.attempts is not None:
        constants[processor.retry.attempts] = hold.attempts
    return question.table.filter(pk=hold.pk, **constants)


def _stamp(time: datetime) -> int:
    """Return the microseconds since 1970, in the zone that the database's columns are in."""
    epoch = datetime(1970, 1, 1, tzinfo=None if time.tzinfo is None else UTC)
    return (time - epoch) // _MICROSECOND


# --- the token


def sign(processor: Definition[Any], model: type[Model], hold: Hold, bound_to: str | None) -> str:
    """Return the token of a hold."""
    pk: Any = model._meta.pk
    text = pk.value_to_string(SimpleNamespace(**{pk.attname: hold.pk}))
    contents = [VERSION, hold.using, text, hold.since, hold.duration, hold.attempts]
    return signing.dumps(contents, salt=_salt(processor, bound_to))


def unsign(processor: Definition[Any], token: Any, bound_to: str | None) -> Hold:
    """Return the hold of a token, its key still as a text; raises ``InvalidToken``."""
    try:
        version, *contents = signing.loads(token, salt=_salt(processor, bound_to))
    except (signing.BadSignature, TypeError) as error:  # the latter of what is no text
        raise _invalid(processor, "one that was changed, or given out elsewhere") from error
    if version != VERSION or (contents[3] is None) != (processor.lease is None):
        raise _invalid(processor, "one of another version of the processor")
    if contents[0] not in connections.databases:
        raise _invalid(processor, f"one of a database {contents[0]!r} that is not in DATABASES")
    return Hold(*contents)


def of_model(processor: Definition[Any], model: type[Model], hold: Hold) -> Hold:
    """Return the hold of a token with its key; raises ``InvalidToken``."""
    try:
        found = model._meta.pk.to_python(hold.pk)
    except (ValidationError, ValueError, TypeError) as error:
        got = f"one whose key {hold.pk!r:.100} is no key of the model"
        raise _invalid(processor, got) from error
    return replace(hold, pk=tuple(found) if isinstance(found, list) else found)


def _salt(processor: Definition[Any], bound_to: str | None) -> str:
    bound = "" if bound_to is None else f"\0{bound_to}"
    return f"dcl_processor.reservation:{processor.name}{bound}"


def _invalid(processor: Definition[Any], got: str) -> InvalidToken:
    return InvalidToken(
        f"{processor.name}: expected a token that reserve() gave out for this processor and this "
        f"bound_to, got {got}; reserve another row."
    )
