"""When a watched processor runs next: at once after work, seldom when idle or broken.

Times are those of the monotonic clock, waits are in seconds. A part of each wait is random, so that
copies which were started together, or which lost their server together, do not come back together.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from dcl_processor.report import Report

#: Intervals that a wait grows to while nothing is found, a quarter longer with each look.
MOST_INTERVALS = 3
_SLOWER = 1.25

#: Seconds until a run that could not be made is tried again: doubled each time, up to the last.
FIRST_RETRY, LAST_RETRY = 1.0, 60.0

#: Seconds at least between two runs of which the second would try the same failing rows.
_NO_SOONER = 1.0


def retry_after(troubles: int) -> float:
    """Return how long to wait after so many troubles in a row, which is half of it random."""
    longest: float = min(FIRST_RETRY * 2.0 ** min(troubles - 1, 16), LAST_RETRY)
    return longest * random.uniform(0.5, 1)  # noqa: S311  # no secret


def did_something(report: Report) -> bool:
    """Tell whether any row was tried: one that others have locked is theirs to tell of."""
    outcomes = (report.processed, report.failed, report.discarded, report.snoozed)
    return any(outcomes) or report.lease_lost > 0


@dataclass(slots=True)
class Pace:
    """The next run of one processor; ``due`` says when."""

    interval: float
    #: Whether a row that fails, or is snoozed, can be told to wait: by a column of its own.
    rows_wait: bool
    #: Whether rows may be pending for ever: then a run that handled some says nothing of the next.
    repeats: bool
    due: float = field(default_factory=time.monotonic)
    _no_sooner: float = 0.0
    _look_again: float = 0.0
    _idle: int = 0
    _troubles: int = 0

    def ran(self, report: Report, started: float) -> None:
        """Go on at once after a run that got on, as long as it would not try the same rows."""
        now = time.monotonic()
        self._troubles = 0
        got_on = report.processed + report.discarded > 0
        same_rows = self.repeats or (report.failed + report.snoozed > 0 and not self.rows_wait)
        self._idle = 0 if got_on else self._idle + 1
        self._no_sooner = now + min(_NO_SOONER, self.interval) if same_rows else now
        if got_on and report.stopped in {"limit", "timeout"} and not self.repeats:
            self.due = now
        elif got_on and report.stopped == "drained" and not same_rows:
            # Here the end of a burst is waited for, and one look finds all of it.
            self.due = max(now, self._look_again)
        else:
            self.due = now + self._wait()
            if started < self._look_again:
                self.due = max(self._look_again, self._no_sooner)

    def broke(self) -> float:
        """Put the next try off after a run that could not be made; return by how much."""
        self._troubles += 1
        wait = retry_after(self._troubles)
        self.due = self._no_sooner = time.monotonic() + wait
        return wait

    def wake(self, burst: float) -> None:
        """Run now, and again when the burst of calls is over that notify only once."""
        now = time.monotonic()
        self._look_again = now + burst
        self._idle = 0
        self.due = max(now, self._no_sooner)

    def _wait(self) -> float:
        slower: float = min(_SLOWER ** min(max(self._idle - 1, 0), 16), MOST_INTERVALS)
        return self.interval * slower * random.uniform(0.75, 1)  # noqa: S311  # as above
