"""When a watched processor runs next: at once after work, later each time when it is broken.

Times are those of the monotonic clock, waits are in seconds. A part of each wait is random, so that
workers that started together, or lost their server together, do not come back together.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcl_processor import steady as time
from dcl_processor.report import Report

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

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
    outcomes = (report.processed, report.failed, report.discarded, report.snoozed)
    return any(outcomes) or report.lease_lost > 0


@dataclass(slots=True)
class Pace:
    """The next run of one processor; ``due`` is its time."""

    interval: float
    #: Whether a row that fails, or is snoozed, can wait, because a column keeps its next time.
    rows_wait: bool
    #: Whether rows may be pending forever: then handled rows predict nothing about the next run.
    repeats: bool
    due: float = field(default_factory=time.monotonic)
    _no_sooner: float = 0.0
    _failures: int = 0

    @classmethod
    def of(cls, processor: Definition[Any], interval: float) -> Pace:
        """Return the pace of a processor that has not run yet."""
        retry = processor.retry
        rows_wait = retry is not None and retry.next_attempt_at is not None
        return cls(interval, rows_wait, processor.repeats)

    def ran(self, report: Report) -> None:
        """Run again at once after a run that made progress, unless it would try the same rows."""
        now = time.monotonic()
        self._failures = 0
        got_on = report.processed + report.discarded > 0
        same_rows = self.repeats or (report.failed + report.snoozed > 0 and not self.rows_wait)
        self._no_sooner = now + min(_NO_SOONER, self.interval) if same_rows else now
        has_more = report.stopped in {"limit", "timeout"} and not self.repeats
        drained = report.stopped == "drained" and not same_rows
        self.due = now if got_on and (has_more or drained) else now + self._wait()

    def broke(self) -> float:
        """Postpone the next try after a run that could not start; return by how many seconds."""
        self._failures += 1
        wait = backoff(self._failures)
        self.due = self._no_sooner = time.monotonic() + wait
        return wait

    def wake(self) -> None:
        """Run now."""
        self.due = max(time.monotonic(), self._no_sooner)

    def _wait(self) -> float:
        return self.interval * random.uniform(0.75, 1)  # noqa: S311  # as above
