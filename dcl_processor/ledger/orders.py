"""What an operator orders: pause and resume; each is one statement for a processor.

What a worker reads of the orders is one query for all its processors.

Two operators may order at the same time. The database lets one of two pauses, or of two resumes,
change the row, and the other one learns that there was nothing to change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.utils.timezone import get_default_timezone, is_naive, make_aware, make_naive

from dcl_processor.exceptions import InvalidOption
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.processor import BatchProcessor
from dcl_processor.report.errors import printable
from dcl_processor.report.values import TEN_YEARS, expect_seconds, expect_type
from dcl_processor.worker import this_user

from .models import NAME, PERSON, TEXT, Control, alias, bounded_wait, ensure, row_of

#: All processors, in the place of one.
ALL = ""

Subject = BatchProcessor[Any] | str


def pause(
    processor: Subject,
    *,
    reason: str = "",
    until: datetime | timedelta | float | None = None,
    by: str = "",
) -> bool:
    """Let no worker start a row of the processor; return whether it was not paused before.

    ``processor``: a processor, its name, or ``ALL``, for all processors at once, which is a pause
    of its own. ``reason``: for people. ``until``: the end of the pause: a ``datetime``, or seconds
    (or a ``timedelta``) from now; ``None``: ``resume()`` ends it. ``by``: who pauses it, default
    the user of this process and the host. Rows that are being handled are finished. A pause that is
    over, by its ``until``, is replaced; one that is not stays as it is.

    Raises ``InvalidOption`` for a name that is too long, and for a value that is no time, or a time
    that is over. An order waits for a lock of another session for 10 seconds.
    """
    name = name_of(processor)
    # Race: two orders. The row's lock lets one of two pauses find that there is none yet.
    free = Q(paused_at=None) | Q(paused_until__lte=DatabaseNow())
    values = {
        "paused_at": DatabaseNow(),
        "paused_until": _end(until),
        "paused_by": person(by),
        "reason": printable(reason)[:TEXT],
    }
    return _change(name, values, free) > 0


def resume(processor: Subject) -> bool:
    """End the pause of the processor; return whether it was paused.

    ``processor``: as for ``pause()``. After a pause of ``ALL``, those that were paused by
    themselves stay paused.
    """
    name = name_of(processor)
    is_paused = Q(paused_at__isnull=False) & (
        Q(paused_until=None) | Q(paused_until__gt=DatabaseNow())
    )
    ended = {"paused_at": None, "paused_until": None, "paused_by": "", "reason": ""}
    values = ended
    return _change(name, values, is_paused) > 0


def _change(name: str, values: Mapping[str, Any], condition: Q | None = None) -> int:
    """Change the row of a processor by one statement; return how many were changed: 1 or 0."""
    ensure(name)
    with bounded_wait():
        return row_of(name).filter(condition or Q()).update(**values)


def name_of(processor: Subject) -> str:
    """Return the name; ``""``: all processors."""
    name = processor.name if isinstance(processor, BatchProcessor) else processor
    expect_type("expected a processor", name, str, "a processor, its name, or ALL")
    if len(name) > NAME:
        raise InvalidOption(
            f"expected a processor's name of at most {NAME} characters for the ledger, got "
            f"{len(name)}; set a shorter name=…."
        )
    return name


def person(by: str) -> str:
    """Return who gives an order: the given name, or the user of this process and the host."""
    return printable(by or this_user())[:PERSON]


def _end(until: datetime | timedelta | float | None) -> Any:
    if until is None:
        return None
    if isinstance(until, datetime):
        # As the columns store times, with or without USE_TZ.
        zone = None if settings.USE_TZ else get_default_timezone()
        end = make_aware(until, zone) if is_naive(until) else until
        if end <= datetime.now(UTC):
            raise InvalidOption(
                f"expected until to be a time to come, got {until}, which is over; give a later "
                "time, or seconds from now."
            )
        return end if zone is None else make_naive(end, zone)
    length = expect_seconds("expected until", until, most=TEN_YEARS, above_zero=True)
    return _later(length)


def _later(seconds: float) -> Later:
    return Later(timedelta(seconds=seconds))


# --- what a worker reads


@dataclass(frozen=True, slots=True)
class Orders:
    """What is ordered of one processor, orders for all processors included."""

    #: When the answer was there, by this process's monotonic clock.
    read_at: float
    is_paused: bool = False

    @property
    def age(self) -> float:
        """Return how many seconds ago it was read."""
        return time.monotonic() - self.read_at


def read_orders(names: Collection[str]) -> Mapping[str, Orders]:
    """Return the orders for each of these processors."""
    wanted = Control.objects.using(alias()).filter(processor__in=[ALL, *names])
    found = {row.processor: row for row in wanted.annotate(clock=DatabaseNow())}
    now = time.monotonic()
    everywhere = found.get(ALL)
    return {name: _orders(now, found.get(name), everywhere) for name in names}


def _orders(read_at: float, own: Control | None, everywhere: Control | None) -> Orders:
    both = [row for row in (own, everywhere) if row is not None]
    return Orders(read_at=read_at, is_paused=any(is_paused(row) for row in both))


def is_paused(row: Control) -> bool:
    """Return whether a row that was read with ``clock`` is paused at that time."""
    until = row.paused_until
    return row.paused_at is not None and (until is None or until > row.clock)  # type: ignore[attr-defined]  # an annotation
