"""When a watched processor runs next: at once after work, later each time when it is broken.

Times are those of the monotonic clock, waits are in seconds. A part of each wait is random, so that
workers that started together, or lost their server together, do not come back together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcl_processor import steady as time
from dcl_processor.report import TRIED, Report

if TYPE_CHECKING:
    from dcl_processor.processor import BatchProcessor

#: Seconds between two looks for a stop while a watch waits, which is most of its life.
POLL_IDLE = 0.2

#: The fewest seconds between two runs if the second one would try the same failing rows.
_NO_SOONER = 1.0

#: Seconds.
LONGEST_BACKOFF = 60.0


def backoff(failures: int) -> float:
    """Return the seconds until a further try after this many failures of what could not start.

    They are doubled after each failure, up to ``LONGEST_BACKOFF``; half of them is random.
    """
    longest: float = min(2.0 ** min(failures - 1, 16), LONGEST_BACKOFF)
    return longest * random.uniform(0.5, 1)  # noqa: S311  # no secret


def did_something(report: Report) -> bool:
    """Return whether any row was tried; other workers report the rows that they have locked."""
    return any(getattr(report, each) for each in (*TRIED, "lease_lost"))


@dataclass(slots=True)
class Pace:
    """The next run of one processor; ``due`` is its time."""

    processor: BatchProcessor[Any]
    interval: float
    due: float = field(default_factory=time.monotonic)
    #: Runs that could not start, since the last one that did.
    failures: int = 0
    _no_sooner: float = 0.0

    def ran(self, report: Report) -> None:
        """Run again at once after a run that made progress, unless it would try the same rows."""
        now = time.monotonic()
        self.failures = 0
        retry, repeats = self.processor.retry, self.processor.repeats
        # A row that fails, or is snoozed, can wait if a column keeps its next time.
        rows_wait = retry is not None and retry.next_attempt_at is not None
        got_on = report.processed + report.discarded > 0
        # If rows may be pending forever, handled rows predict nothing about the next run.
        same_rows = repeats or (report.failed + report.snoozed > 0 and not rows_wait)
        self._no_sooner = now + min(_NO_SOONER, self.interval) if same_rows else now
        has_more = report.stopped in {"limit", "timeout"} and not repeats
        drained = report.stopped == "drained" and not same_rows
        self.due = now if got_on and (has_more or drained) else now + self._wait()

    def broke(self) -> None:
        """Postpone the next try after a run that could not start."""
        self.failures += 1
        self.due = self._no_sooner = time.monotonic() + backoff(self.failures)

    def wake(self) -> None:
        """Run now."""
        self.due = max(time.monotonic(), self._no_sooner)

    def _wait(self) -> float:
        return self.interval * random.uniform(0.75, 1)  # noqa: S311  # as above
