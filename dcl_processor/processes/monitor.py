"""Watches the calls of this process from a thread: warns of long ones, and sends beats."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from dcl_processor import steady as time
from dcl_processor.execution import calls
from dcl_processor.execution.calls import Call

from .beats import AtWork, Beat, clock, lasted, most_urgent

logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks.
PACE = 1.0

#: Seconds after which a call is warned of; again each time that it has taken twice as long.
FIRST_WARNING = 300.0


class Monitor:
    """Looks at the calls of this process in each ``pace`` (seconds), until the block ends.

    ``send`` is called with each beat, in the monitor's thread. ``stop``: of the worker.
    ``is_supervised``: whether a parent kills this process when a call does not end. The thread
    runs only as long as Python runs other threads: a process that is stopped, or whose handler
    keeps the GIL, sends no beats.
    """

    def __init__(
        self,
        send: Callable[[Beat], None],
        stop: threading.Event,
        *,
        pace: float | None = None,
        is_supervised: bool = False,
    ) -> None:
        self._send = send
        self._stop = stop
        self._pace = PACE if pace is None else pace
        self._is_supervised = is_supervised
        self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        #: The age at which each call is warned of next, and the calls that were warned of as late.
        self._next: dict[Call, float] = {}
        self._late: set[Call] = set()

    def __enter__(self) -> Self:
        calls.watchers += 1
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        calls.watchers -= 1
        self._over = True
        self._wake.set()
        # Bounded, because a beat may wait for a reader that has stopped.
        self._thread.join(PACE)

    def look_now(self) -> None:
        """Send a beat now; not to be called in a signal handler, as an event's lock is plain."""
        self._wake.set()

    def look(self, now: float) -> None:
        """Send a beat, warn of calls that take long, and record the rows of those that are late.

        ``now``: by the monotonic clock.
        """
        self._send(Beat(now, most_urgent(now), self._stop.is_set()))
        under_way = calls.under_way()
        for call in under_way:
            self._warn(call, now - call.since)
        self._next = {call: self._next[call] for call in under_way}
        self._late &= {*under_way}

    def _run(self) -> None:
        while not self._over:
            # Without beats this process would be killed, so no error ends the thread.
            with suppress(Exception):
                self.look(time.monotonic())
            self._wake.wait(self._pace)
            self._wake.clear()

    def _warn(self, call: Call, age: float) -> None:
        due = self._next.setdefault(call, FIRST_WARNING)
        if age >= due:
            while due <= age:
                due *= 2
            self._next[call] = due
            still = "has not returned" if call.what else "is still in its handler"
            self._log(call, f"{still} after {lasted(age)}")
        # A handler that was interrupted has some time to clean up.
        if call.limit is None or age <= call.limit + calls.GRACE / 2 or call.is_held_up:
            return
        if call not in self._late:
            self._late.add(call)
            end = f"; its worker is killed after {calls.GRACE:g} s" if self._is_supervised else ""
            what = f"goes on although its handler_timeout of {call.limit:g} s is over{end}"
            self._log(call, what)

    def _log(self, call: Call, what: str) -> None:
        seen, since = AtWork.of(call), clock(call.since)
        words = "%s: process %d: %s %s (since %s)"
        warn = partial(logger.warning, words, call.label, os.getpid(), seen.named, what, since)
        if threading.current_thread() is self._thread:
            # A log handler may take long, and without beats this process would be killed.
            threading.Thread(target=warn, name="warning", daemon=True).start()
        else:
            warn()
