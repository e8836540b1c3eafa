"""The limits of a run: rows, seconds, and a stop from outside."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from threading import Event
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor.pending import scan
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question
from dcl_processor.report.exceptions import TooManyPending
from dcl_processor.report.report import Stopped
from dcl_processor.report.values import DAY, expect, expect_seconds, expect_whole_number

FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0

#: Handlers in flight at once. Each thread has its own connection; servers allow hundreds of them.
MOST_THREADS, MOST_TASKS = 1_000, 10_000


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
        if limit is not None:
            expect_whole_number("expected limit", limit, of="rows", least=0)
        self.rows = limit
        self._deadline = None
        if timeout is not None:
            self._deadline = time.monotonic() + expect_seconds("expected timeout", timeout)
        fix = "; the next run finds the rows that are still locked"
        self._wait = expect_seconds("expected wait_for_locked", wait_for_locked, most=DAY, fix=fix)
        fits = stop is None or (hasattr(stop, "is_set") and hasattr(stop, "wait"))
        words = "a threading.Event, which ends the run when it is set"
        expect(fits, "expected stop", words, stop)
        self._stop = stop or Event()

    def is_up(self) -> bool:
        """Return whether the time is up, or the run is to stop; any thread may ask."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return late or self._stop.is_set()

    def exceeded(self, handled: int) -> Stopped | None:
        """Return why no further row may start, or ``None`` if one may."""
        if self._stop.is_set():
            return "signal"
        if self.rows is not None and handled >= self.rows:
            return "limit"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "timeout"
        return None

    def pause(self, seconds: float) -> None:
        """Wait, but for no longer than until the run is to stop."""
        if self._stop.is_set():
            time.sleep(min(seconds, FIRST_WAIT))
        else:
            self._stop.wait(seconds)

    def waits(self) -> Iterator[bool]:
        """Wait a little longer each time, until ``wait_for_locked`` or ``timeout`` is over."""
        # Race: endless run. The run waits for rows that other workers keep locked until then.
        end = time.monotonic() + self._wait
        if self._deadline is not None:
            end = min(end, self._deadline)
        pause = FIRST_WAIT
        while (left := end - time.monotonic()) > 0:
            self._stop.wait(min(left, pause * random.uniform(0.5, 1)))  # noqa: S311
            yield True
            pause = min(pause * 2, LONGEST_WAIT)


def refuse_backlog(label: str, question: Question[Any], most: int) -> None:
    """Raise ``TooManyPending`` if more than ``most`` rows wait."""
    if scan.count(question, most) > most:
        raise TooManyPending(
            f"{label}: expected at most max_pending={most} pending rows in a run without limit, "
            "got more; pass limit=… (--limit) to handle some of them first, or raise max_pending."
        )


def check_alias(alias: str | None) -> None:
    """Raise ``InvalidOption`` unless the alias is one of the settings' ``DATABASES``."""
    known = connections.databases
    words = f"one of the databases {', '.join(known)}"
    expect(alias is None or alias in known, "expected using", words, alias)


def check_filter(filter: Any) -> None:
    """Raise ``InvalidOption`` unless the filter can be ANDed into a queryset."""
    fits = filter is None or isinstance(filter, Q) or getattr(filter, "conditional", False)
    expect(fits, "expected filter", "a Q object", filter)
