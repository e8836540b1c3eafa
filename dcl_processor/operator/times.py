"""Times as people read and write them, and the time that a question may take."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, TypeVar

from django.db import connections, transaction
from django.utils import timezone

from dcl_processor.report.exceptions import InvalidOption
from dcl_processor.report.values import DAY, TEN_YEARS

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": DAY}

#: Seconds.
LONGEST_BACKOFF = 60.0

#: Milliseconds: 0 would be no limit, and more than an ``int`` of 32 bits is refused.
_LEAST, _MOST = 1, 2**31 - 1

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


# --- limits of time that the database itself enforces


@contextmanager
def reading(using: str, seconds: float) -> Iterator[None]:
    """Limit each statement of a block that only reads.

    The limit is the server's own, because a client that gives up leaves its statement running. A
    statement that takes longer raises an error that ``is_statement_timeout()`` recognises. On
    PostgreSQL the block is a transaction, or a savepoint, and its rollback ends the limit. SQLite
    has no limit, and gets no transaction, which may begin with its write lock; nor has MySQL.
    """
    has_block = connections[using].vendor == "postgresql"
    with transaction.atomic(using=using) if has_block else nullcontext():
        with time_limit(using, seconds):
            yield
        if has_block:
            transaction.set_rollback(True, using=using)


@contextmanager
def time_limit(using: str, seconds: float) -> Iterator[None]:
    """Limit each statement of the block; on PostgreSQL until the end of its transaction."""
    connection: Any = connections[using]
    milliseconds = round(min(max(seconds * 1000, _LEAST), _MOST))
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {milliseconds}")
        yield
    elif connection.vendor == "mysql" and connection.mysql_is_mariadb:
        limit = f"SET STATEMENT max_statement_time = {milliseconds / 1000:.3f} FOR"

        def limited(execute: Any, sql: str, *arguments: Any) -> Any:
            return execute(f"{limit} {sql}", *arguments)

        with connection.execute_wrapper(limited):
            yield
    else:
        yield
