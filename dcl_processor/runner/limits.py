"""The limits of a run: rows, seconds, and a stop from outside."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from threading import Event
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor.exceptions import InvalidOption
from dcl_processor.report import Stopped

# The first wait is about as long as a short handler, the longest about as long as a person waits.
# Half of each wait is random, so that workers that collided once do not collide again.
FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0

#: Handlers in flight at once. Each thread has its own connection; servers allow hundreds of them.
MOST_THREADS, MOST_TASKS = 1_000, 10_000

#: Seconds. A run that waits longer only keeps a worker busy.
LONGEST_WAIT_FOR_LOCKED = 86_400.0


class Limits:
    """Decides when a run may start no further row, and how long it may wait."""

    def __init__(
        self,
        *,
        limit: int | None,
        timeout: float | timedelta | None,
        wait_for_locked: float | timedelta,
        stop: Event | None,
    ) -> None:
        if limit is not None and (not _is_number(limit, int) or limit < 0):
            raise InvalidOption(f"expected limit to be a number of rows from 0, got {limit!r}.")
        seconds = None if timeout is None else _seconds("timeout", timeout)
        self._limit = limit
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._wait = _seconds("wait_for_locked", wait_for_locked)
        if self._wait > LONGEST_WAIT_FOR_LOCKED:
            raise InvalidOption(
                f"expected wait_for_locked to be a day at most, got {wait_for_locked!r}; the rows "
                "that are still locked are found by the next run."
            )
        self._stop = stop or Event()

    def exceeded(self, handled: int) -> Stopped | None:
        """Return why no further row may start, or ``None`` if one may."""
        if self._stop.is_set():
            return "signal"
        if self._limit is not None and handled >= self._limit:
            return "limit"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "timeout"
        return None

    def clip(self, size: int, handled: int) -> int:
        """Return how many of ``size`` rows the limit leaves room for."""
        return size if self._limit is None else min(size, self._limit - handled)

    def waits(self) -> Iterator[bool]:
        """Wait a little longer each time, until ``wait_for_locked`` or ``timeout`` is over."""
        # Race: endless run. The run waits for rows that other workers keep locked until then.
        end = time.monotonic() + self._wait
        if self._deadline is not None:
            end = min(end, self._deadline)
        pause = FIRST_WAIT
        while (left := end - time.monotonic()) > 0:
            self._stop.wait(min(left, pause * random.uniform(0.5, 1)))  # noqa: S311  # no secret
            yield True
            pause = min(pause * 2, LONGEST_WAIT)


def check_concurrency(concurrency: Any, *, is_async: bool = True) -> None:
    """Raise unless this number of handlers may be in flight at once."""
    most = MOST_TASKS if is_async else MOST_THREADS
    if not _is_number(concurrency, int) or not 1 <= concurrency <= most:
        raise InvalidOption(
            f"expected concurrency to be a number of handlers from 1 to {most}, got "
            f"{concurrency!r}."
        )


def check_stop(stop: Any) -> None:
    """Raise unless ``stop`` has ``is_set`` and ``wait``, as a ``threading.Event`` has."""
    if stop is not None and not (hasattr(stop, "is_set") and hasattr(stop, "wait")):
        raise InvalidOption(
            "expected stop to be a threading.Event, which ends the run when it is set, got "
            f"{stop!r}."
        )


def check_alias(name: str, alias: str | None) -> None:
    """Raise ``InvalidOption`` unless the alias is one of the settings' ``DATABASES``."""
    if alias is not None and alias not in connections.databases:
        raise InvalidOption(
            f"expected {name} to be one of the databases {', '.join(connections.databases)}, got "
            f"{alias!r}."
        )


def check_filter(filter: Any) -> None:
    """Raise ``InvalidOption`` unless the filter can be ANDed into a queryset."""
    if filter is not None and not isinstance(filter, Q) and not getattr(filter, "conditional", 0):
        raise InvalidOption(f"expected filter to be a Q object, got {filter!r}.")


def _seconds(name: str, value: Any) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(seconds, int | float) or not seconds >= 0:
        raise InvalidOption(
            f"expected {name} to be a number of seconds from 0, or a timedelta, got {value!r}."
        )
    return float(seconds)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
