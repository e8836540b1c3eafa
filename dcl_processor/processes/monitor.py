"""Watches the calls of this process from a thread: warns of long ones, and sends beats."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Self

from dcl_processor.execution import calls
from dcl_processor.execution.calls import Call
from dcl_processor.operator.times import span
from dcl_processor.pending import steady as time

from .news import AtWork, Beat, clock

logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks.
PACE = 1.0

#: Seconds after which a call is warned of, once.
WARNED_AFTER = 300.0

#: The longest time between two looks that counts in full.
_LONGEST_PAUSE = 2.0


class OwnTime:
    """The seconds for which this process has run.

    While the machine, its container or this process was stopped, no handler could end, no child
    could send a beat, and no beat was read: that time says nothing about them.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def pass_(self, now: float | None = None) -> float:
        """Return the seconds; to be called more often than every two seconds."""
        now = time.monotonic() if now is None else now
        self.seconds += min(now - self._last, _LONGEST_PAUSE)
        self._last = now
        return self.seconds


class Monitor:
    """Looks at the calls of this process in each ``pace`` (seconds), until the block ends.

    ``send`` is called with each beat, in the monitor's thread, and ``kill`` when a call has to be
    ended with its process. The thread runs only as long as Python runs other threads: a process
    that is stopped, or whose handler keeps the GIL, sends no beats.
    """

    def __init__(
        self,
        send: Callable[[Beat], None],
        *,
        pace: float | None = None,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._kill = kill
        self._pace = PACE if pace is None else pace
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._time = OwnTime()
        #: The call that was late at the last look, and since when, in seconds of its own time.
        self._late: tuple[Call | None, float] = None, 0.0
        self._warned_of: set[Call] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        # Bounded, because a beat may wait for a reader that has stopped.
        self._thread.join(PACE)

    def look(self, now: float) -> None:
        """Send a beat, and warn of calls that take long; ``now``: by the monotonic clock."""
        call = _most_urgent(now)
        is_overdue = self._is_overdue(call, now)
        self._send(Beat(None if call is None else AtWork.of(call), is_overdue))
        # Not a call that has ended while the beat waited for its reader.
        if is_overdue and call in calls.under_way():
            self._kill()
        long = {each for each in calls.under_way() if now - each.since >= WARNED_AFTER}
        for each in long - self._warned_of:
            self._warn(each, now - each.since)
        self._warned_of = long

    def _run(self) -> None:
        while not self._over.is_set():
            # Without beats this process would be killed, so no error ends the thread.
            with suppress(Exception):
                self.look(time.monotonic())
            self._over.wait(self._pace)

    def _is_overdue(self, call: Call | None, now: float) -> bool:
        """Return whether the call has not ended in its grace after it was first seen to be late.

        From then on, and not from its limit: after a pause of the whole machine, the handler has to
        get the time to be interrupted.
        """
        own = self._time.pass_(now)
        if call is None or not call.is_late(now):
            call = None
        late, since = self._late
        self._late = call, (since if call is late else own)
        return call is not None and own - self._late[1] > calls.GRACE

    def _warn(self, call: Call, age: float) -> None:
        seen, since = AtWork.of(call), clock(call.since)
        words = "%s: process %d: %s is still in its handler after %s (since %s)"
        known = call.label, os.getpid(), seen.named, span(age), since
        warn = partial(logger.warning, words, *known)
        if threading.current_thread() is self._thread:
            # A log handler may take long, and without beats this process would be killed.
            threading.Thread(target=warn, name="warning", daemon=True).start()
        else:
            warn()


def _most_urgent(now: float) -> Call | None:
    """Return the oldest call of this process that is late, or else the oldest one.

    A late call that another one keeps from being cancelled is left out: the other one is at fault.
    """
    found = [call for call in calls.under_way() if not (call.is_late(now) and call.is_held_up)]
    late = (call for call in found if call.is_late(now))
    return next(late, found[0] if found else None)


# --- what the parent knows of one child, by its messages


#: Seconds without a message after which a worker counts as silent, and after which it may be
#: killed.
SILENT, KILLED_SILENT = 10.0, 30.0

#: Seconds that a child has until its first message, in which it loads Django and the project.
LOADED_WITHIN = 60.0


class Life:
    """The signs of life of a child; all times are the parent's own (``OwnTime``).

    ``limit``: the longest ``handler_timeout`` of its processors, ``None`` if one has none.
    """

    def __init__(self, limit: float | None, now: float) -> None:
        self._limit = limit
        self._heard = now
        #: Whether the child has sent a message.
        self.is_loaded = False
        self.beat = Beat(None)

    def hear(self, now: float, event: object) -> None:
        """Note a message of the child, perhaps a beat."""
        self._heard = now
        self.is_loaded = True
        if isinstance(event, Beat):
            self.beat = event

    def is_silent(self, now: float) -> bool:
        """Return whether there has been no sign of life for a while."""
        return now - self._heard > (SILENT if self.is_loaded else LOADED_WITHIN)

    def fault(self, now: float) -> str | None:
        """Return why the child has to be killed, if it has to be: it does not move."""
        if self._limit is None:
            return None
        silence = now - self._heard
        least = KILLED_SILENT if self.is_loaded else max(KILLED_SILENT, LOADED_WITHIN)
        if silence <= max(least, self._limit + calls.GRACE):
            return None
        seen = "" if self.beat.call is None else f", last seen at {self.beat.call}"
        return f"it has not moved for {span(silence)}{seen}, handler_timeout={self._limit:g}"

    def own_fault(self) -> str | None:
        """Return why the child has killed itself, if it has: its handler did not end."""
        call = self.beat.call
        if call is None or not self.beat.is_overdue:
            return None
        return (
            f"{call.named} did not leave its handler within {calls.GRACE:g} s after "
            f"handler_timeout={call.limit:g} (since {clock(call.since)})"
        )
