"""Counts and distributions of one processor, which can be added, sent to another process, and kept.

Buckets are counted alone here, and not cumulated as in an exposition, so that two tallies are added
field by field.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

#: The outcomes of rows that a handler was called for, as ``row_finished`` has them.
OUTCOMES = ("processed", "failed", "discarded", "snoozed")

#: Upper bounds of durations, in seconds. Libraries' defaults end at 10 s; handlers take minutes.
DURATIONS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

#: Upper bounds of the age of a row, in seconds: a second to a week.
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 604_800.0)


@dataclass(slots=True)
class Distribution:
    """How many values were at most each bound; the last count is for values above all bounds."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: Distribution) -> None:
        """Add the counts of another one with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def number(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


def _durations() -> Distribution:
    return Distribution(DURATIONS)


@dataclass(slots=True)
class Tally:
    """What one processor did.

    ``rows``: by outcome. ``retries``: failed rows that are to be tried again. ``lost_leases``: rows
    that another worker had taken over at their settlement. ``handler``: seconds of each call.
    ``lock``: seconds for which each transaction held the locks of its rows. ``age``: seconds for
    which each row was pending at its claim. ``last_success``: when a run last ended without a row
    that failed for good, in seconds since 1970.
    """

    rows: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    lost_leases: int = 0
    handler: Distribution = field(default_factory=_durations)
    lock: Distribution = field(default_factory=_durations)
    age: Distribution = field(default_factory=lambda: Distribution(AGES))
    last_success: float | None = None

    def merge(self, other: Tally) -> None:
        """Add another tally of the same processor."""
        self.rows.update(other.rows)
        self.retries += other.retries
        self.lost_leases += other.lost_leases
        self.handler.merge(other.handler)
        self.lock.merge(other.lock)
        self.age.merge(other.age)
        times = [each for each in (self.last_success, other.last_success) if each is not None]
        self.last_success = max(times, default=None)
