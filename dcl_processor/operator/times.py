"""Times and durations, as people read and write them."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.utils import timezone

from dcl_processor.report.exceptions import InvalidOption
from dcl_processor.report.values import DAY, TEN_YEARS

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": DAY}

#: Seconds.
LONGEST_BACKOFF = 60.0

Time = TypeVar("Time", bound=datetime | None)


def utc(at: Time) -> Time:
    """Return a column's time in UTC; without a zone it is local time of ``TIME_ZONE``."""
    if at is None:
        return at
    zone = timezone.get_default_timezone()
    aware: Any = timezone.make_aware(at, zone) if at.tzinfo is None else at
    return aware.astimezone(UTC)  # type: ignore[no-any-return]  # a datetime


def utc_text(at: datetime) -> str:
    """Write a column's time for people."""
    return f"{utc(at):%Y-%m-%d %H:%M:%S} UTC"


def span(seconds: float) -> str:
    """Write a duration in its largest unit, rounded down."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0) // 1:.0f} s"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration that was typed in: ``90``, ``90s``, ``15m``, ``2h``, ``1d``.

    Raises ``InvalidOption`` for another text.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([smhd]?)", text.strip())
    if found is None or float(found[1]) * _UNITS[found[2]] > TEN_YEARS:
        raise InvalidOption(
            f"expected a duration up to ten years, such as 90, 90s, 15m, 2h or 1d, got {text!r}."
        )
    return float(found[1]) * _UNITS[found[2]]


def backoff(failures: int) -> float:
    """Return the seconds until a further try after this many failures of what could not start.

    They are doubled after each failure, up to ``LONGEST_BACKOFF``; half of them is random.
    """
    longest: float = min(2.0 ** min(failures - 1, 16), LONGEST_BACKOFF)
    return longest * random.uniform(0.5, 1)  # noqa: S311  # no secret
