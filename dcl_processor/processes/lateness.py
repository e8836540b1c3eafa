"""Whether a child is alive, and when it has to be killed: judged from its beats."""

from __future__ import annotations

from dcl_processor import steady as time
from dcl_processor.execution import calls
from dcl_processor.execution.in_flight import rows_of

from .beats import AtWork, Beat, clock, lasted

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
