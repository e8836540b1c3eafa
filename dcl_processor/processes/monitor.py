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
from dcl_processor.values import span

from .news import AtWork, Beat, clock, most_urgent

logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks.
PACE = 1.0

#: Seconds after which a call is warned of; again each time that it has taken twice as long.
FIRST_WARNING = 300.0


class Monitor:
    """Looks at the calls of this process in each ``pace`` (seconds), until the block ends.

    ``send`` is called with each beat, in the monitor's thread. The thread runs only as long as
    Python runs other threads: a process that is stopped, or whose handler keeps the GIL, sends no
    beats.
    """

    def __init__(self, send: Callable[[Beat], None], *, pace: float | None = None) -> None:
        self._send = send
        self._pace = PACE if pace is None else pace
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        #: The age at which each call is warned of next.
        self._next: dict[Call, float] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        # Bounded, because a beat may wait for a reader that has stopped.
        self._thread.join(PACE)

    def look(self, now: float) -> None:
        """Send a beat, and warn of calls that take long; ``now``: by the monotonic clock."""
        self._send(Beat(now, most_urgent(now)))
        under_way = calls.under_way()
        for call in under_way:
            self._warn(call, now - call.since)
        self._next = {call: self._next[call] for call in under_way}

    def _run(self) -> None:
        while not self._over.is_set():
            # Without beats this process would be killed, so no error ends the thread.
            with suppress(Exception):
                self.look(time.monotonic())
            self._over.wait(self._pace)

    def _warn(self, call: Call, age: float) -> None:
        due = self._next.setdefault(call, FIRST_WARNING)
        if age < due:
            return
        while due <= age:
            due *= 2
        self._next[call] = due
        seen, since = AtWork.of(call), clock(call.since)
        words = "%s: process %d: %s is still in its handler after %s (since %s)"
        known = call.label, os.getpid(), seen.named, span(age), since
        warn = partial(logger.warning, words, *known)
        if threading.current_thread() is self._thread:
            # A log handler may take long, and without beats this process would be killed.
            threading.Thread(target=warn, name="warning", daemon=True).start()
        else:
            warn()


# --- whether a child is alive, and when it has to be killed: judged from its messages


#: Seconds without a message after which a worker counts as silent, and after which it may be
#: killed.
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
        #: Whether the child has sent a message.
        self.is_loaded = False
        self.call: AtWork | None = None

    def hear(self, now: float, beat: Beat | None = None) -> None:
        """Note a message of the child, perhaps a beat."""
        self._heard = now
        self.is_loaded = True
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
        return now - self._heard > (SILENT if self.is_loaded else LOADED_WITHIN)

    def is_alive(self, now: float) -> bool:
        """Return whether the child moves, and is in no handler that should have ended."""
        return not (self._is_overdue or self.is_silent(now))

    def fault(self, now: float, at: float | None = None) -> str | None:
        """Return why the child has to be killed, if it has to be.

        ``at``: this moment by the monotonic clock, as beats have it. All messages that have come
        must have been heard.
        """
        at = time.monotonic() if at is None else at
        call = self.call
        # Of an old beat, the handler may have ended since, and the later beats may be on their way.
        if call is not None and self._is_overdue and at - self._made <= FRESH:
            return (
                f"{call.named} did not leave its handler within {calls.GRACE:g} s after "
                f"handler_timeout={call.limit:g} (since {clock(call.since)})"
            )
        if self._limit is None:
            return None
        silence = now - self._heard
        least = KILLED_SILENT if self.is_loaded else max(KILLED_SILENT, LOADED_WITHIN)
        if silence <= max(least, self._limit + calls.GRACE):
            return None
        seen = "" if call is None else f", last seen at {call}"
        return f"it has not moved for {span(silence)}{seen}, handler_timeout={self._limit:g}"
