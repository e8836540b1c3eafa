"""Watches the calls of this process from a thread: warns of long ones, and sends beats."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self

from dcl_processor import steady as time
from dcl_processor.execution import calls
from dcl_processor.execution.calls import Call
from dcl_processor.execution.in_flight import rows_of

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

    def __exit__(self, *raised: object) -> None:
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


# --- whether a child is alive, and when it has to be killed: judged from its beats


#: Seconds without a beat after which a worker counts as silent, and after which it may be killed.
SILENT, KILLED_SILENT = 10.0, 30.0

#: Seconds after which a beat no longer tells what its worker is at.
FRESH = 3.0

#: Seconds that a child has until its first message, in which it loads Django and the project.
LOADED_WITHIN = 60.0

#: The longest time between two looks that counts in full.
_LONGEST_PAUSE = 2.0


class OwnTime:
    """The seconds for which this process has run.

    While the machine, its container or this process was stopped, no child could send a beat, or
    the beats were not read: that time says nothing about the children.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def pass_(self) -> float:
        """Return the seconds; to be called more often than every two seconds."""
        now = time.monotonic()
        self.seconds += min(now - self._last, _LONGEST_PAUSE)
        self._last = now
        return self.seconds


class Lateness:
    """What the parent knows of one child; all times are the parent's own (``OwnTime``).

    ``limit``: the longest ``handler_timeout`` of its processors, ``None`` if one has none.
    """

    def __init__(self, limit: float | None, now: float) -> None:
        self._limit = limit
        self._heard = now
        self._late_since: float | None = None
        #: Whether the last beat found a handler that has not ended in its grace; when it was made,
        #: by the monotonic clock.
        self._is_overdue = False
        self._made = 0.0
        self._is_loaded = False
        self.call: AtWork | None = None
        self.killed_at: float | None = None

    def hear(self, now: float, beat: Beat | None = None) -> None:
        """Note a message of the child, perhaps a beat."""
        self._heard = now
        self._is_loaded = True
        if beat is None:
            return
        call, before = beat.call, self.call
        self.call, self._made, self._is_overdue = call, beat.at, False
        if call is None or not call.is_late(beat.at):
            self._late_since = None
        elif self._late_since is None or call != before:
            # From here on, and not from its limit: after a pause of the whole machine, the handler
            # has to get the time to be interrupted.
            self._late_since = now
        else:
            has_had_grace = now - self._late_since > calls.GRACE
            self._is_overdue = has_had_grace and call.is_late(beat.at, calls.GRACE)

    def is_silent(self, now: float) -> bool:
        """Return whether there has been no sign of life for a while."""
        return now - self._heard > (SILENT if self._is_loaded else LOADED_WITHIN)

    def is_alive(self, now: float) -> bool:
        """Return whether the child moves, and is in no handler that should have ended."""
        return not (self._is_overdue or self.is_silent(now) or self.killed_at is not None)

    def fault(self, now: float, pid: int, at: float | None = None) -> str | None:
        """Return why the child has to be killed; without a limit it never has to.

        ``call`` is then what it has to be killed for, as far as that is known. ``at``: this moment
        by the monotonic clock, as beats have it. All beats that have come must have been heard.
        """
        if self.killed_at is not None:
            return None
        at = time.monotonic() if at is None else at
        call = self.call
        # Of an old beat, the handler may have ended since, and the later beats may be on their way.
        if call is not None and self._is_overdue and at - self._made <= FRESH:
            return (
                f"{call.named} did not leave its handler within {calls.GRACE:g} s after "
                f"handler_timeout={call.limit:g} (since {clock(call.since)})"
            )
        limit, silence = self._limit, now - self._heard
        if limit is None and call is not None and self._late_since is not None:
            limit = call.limit
        if limit is None:
            return None
        least = KILLED_SILENT if self._is_loaded else max(KILLED_SILENT, LOADED_WITHIN)
        if silence <= max(least, limit + calls.GRACE):
            return None
        notes = rows_of(pid)
        if self._limit is None and not (call is not None and call.is_among(notes)):
            return None  # it may have gone on with a processor that has no limit
        # A beat before the silence may name a row that was finished.
        self.call = AtWork.noted(notes)
        last = "" if self.call is None else f", last at {self.call}"
        return f"it has not moved for {lasted(silence)}{last}, handler_timeout={limit:g}"
