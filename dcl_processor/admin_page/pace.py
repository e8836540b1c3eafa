"""How fast the pending rows become fewer, from the counts that the page has shown before.

Nothing is stored: the link that refreshes the page carries the counts, so that the bar, the rate
and the chart work without a script. Above the number up to which rows are counted, the counts are
the planner's estimates, corrected by what the ledger has recorded since.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from django.core import signing

from dcl_processor.insights.answer import Answer, How
from dcl_processor.management.wording import rounded
from dcl_processor.values import span

#: A time in seconds since 1970, and the pending rows then, perhaps as an ``Estimate``.
Point = tuple[float, int]

#: Why there is no rate above the number up to which rows are counted.
_NO_RATE = "The rate is not known: it needs a run that the ledger records, or two new estimates."

#: Looks that a link carries for many processors, and for one alone.
FEW, MANY = 3, 40

#: Seconds over which a rate is computed, and the shortest time that gives one.
WINDOW, SHORTEST = 120.0, 0.5


class Estimate(int):
    """A number of rows that is not counted: the planner's, and what follows from it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of the pending rows where they are not counted.

    ``rows``: by the planner. ``as_of``: the time of its statistics, 0 if there are none;
    ``None``: the database does not tell it. ``gone``: rows that recorded runs have finished since
    the last look; ``rate``: rows per second of those at work, ``None`` if no run is. ``gone`` is
    ``None`` without the ledger.
    """

    rows: int
    as_of: float | None
    gone: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """``peak``: the highest count; ``points``: the oldest first; ``rate``: rows per second.

    ``peak`` is ``None`` if the number of rows is not known; ``rate`` if there is only one count.
    """

    peak: int | None
    points: tuple[Point, ...]
    rate: float | None

    @property
    def now(self) -> int:
        return self.points[-1][1] if self.points else 0

    @property
    def handled(self) -> int:
        """Return the value of the bar."""
        return (self.peak or 0) - self.now

    @property
    def is_estimated(self) -> bool:
        """Whether the planner's estimate is in the bar."""
        return isinstance(self.now, Estimate) or isinstance(self.peak, Estimate)

    @property
    def position(self) -> str:
        """Return the value of a bar that is estimated, in words."""
        peak, handled = rounded(self.peak or 0), rounded(self.handled)
        return f"~{handled:,} of ~{peak:,} ({int(100 * self.handled / (self.peak or 1))} %)"

    @property
    def words(self) -> str:
        """Return the rate, and the time that the rest takes at this rate."""
        if self.peak is None:
            return "The number of rows is not known, so there is no rate."
        if self.now == 0:
            return "No row waits."
        if isinstance(self.now, Estimate) and not self.rate:
            return "No run is at work." if self.rate == 0 else _NO_RATE
        if self.rate is None:
            return "The rate is known from the second look on."
        if self.rate == 0:
            return "The number has not changed."
        if self.rate < 0:
            return f"Falling behind by {_figure(-self.rate)}."
        return f"{_figure(self.rate)}; about {span(self.now / self.rate)} left at this rate."


def pace(
    before: Sequence[Point], now: float, pending: Answer[int], expected: Expected | None = None
) -> Pace:
    """Return the pace after another count, or after an estimate if rows are not counted."""
    known = tuple(point for point in before if point[0] < now)
    if pending.value is not None and pending.how is How.EXACT:
        points = (*known, (round(now, 3), pending.value))
    elif expected is not None:
        least = (pending.value or 0) + 1 if pending.how is How.MORE_THAN else 0
        points = _estimated(known, round(now, 3), expected, least)
    else:
        return Pace(None, known, None)
    recorded = None if expected is None else expected.rate
    rate = _rate(points) if recorded is None else recorded
    return Pace(max(count for _, count in points), points, rate)


def _estimated(
    known: tuple[Point, ...], now: float, expected: Expected, least: int
) -> tuple[Point, ...]:
    """Return the counts with an estimate as the last one."""
    rows, gone = expected.rows, expected.gone or 0
    if known and isinstance(known[-1][1], Estimate):
        last, was = known[-1]
        if expected.as_of is not None and expected.as_of <= last:
            # Without a new ANALYZE the planner only knows that the table's file has grown.
            rows = was - gone
        elif expected.gone is not None:
            # What was handled is known, so that the difference is an error of the earlier ones.
            error = rows - (was - gone)
            known = tuple(
                (at, Estimate(max(0, count + error)) if isinstance(count, Estimate) else count)
                for at, count in known
            )
    return (*known, (now, Estimate(max(rows, least, 0))))


def text_of(seen: Mapping[str, Sequence[Point]], most: int) -> str:
    """Return the counts of processors for an address: of the first look, and of the latest.

    All of them are counted at each look, so that the times are written once. With 200 processors
    and ``FEW`` looks these are about 2,000 characters: servers refuse longer addresses from 4,094
    on.
    """
    times = sorted({at for points in seen.values() for at, _ in points})
    kept = times if len(times) <= most else [times[0], *times[1 - most :]]
    written = []
    for points in seen.values():
        counts = dict(points)
        if kept and kept[0] not in counts and (left := sorted({*counts} - {*kept})):
            # Its own first look. Without it the bar would start at 0 again.
            counts[kept[0]] = counts[left[0]]
        # An estimate is written as a negative number.
        found = [counts.get(at) for at in kept]
        written.append([~each if isinstance(each, Estimate) else each for each in found])
    return signing.dumps([kept, written], salt=_salt(seen), compress=True)


def parse(text: str, names: Collection[str]) -> dict[str, tuple[Point, ...]]:
    """Return the counts by processor that an address carries; empty if it is of other names."""
    try:
        times, written = signing.loads(text, salt=_salt(names))
    except signing.BadSignature:
        return {}
    found = {}
    for name, counts in zip(names, written, strict=True):
        own = [(at, each) for at, each in zip(times, counts, strict=True) if each is not None]
        if own:
            found[name] = tuple((at, Estimate(~each) if each < 0 else each) for at, each in own)
    return found


def _salt(names: Iterable[str]) -> str:
    return f"dcl_processor.admin_page.pace.{json.dumps([*names])}"


def rates(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the rows per second that left ``pending`` between each two counts; never below 0.

    Estimates are left out.
    """
    points = [point for point in points if not isinstance(point[1], Estimate)]
    return [
        (later, max(0.0, (before - after) / (later - earlier)))
        for (earlier, before), (later, after) in pairwise(points)
        if later - earlier >= SHORTEST
    ]


def _rate(points: Sequence[Point]) -> float | None:
    is_estimate = isinstance(points[-1][1], Estimate)
    points = [point for point in points if isinstance(point[1], Estimate) is is_estimate]
    if is_estimate:
        # The first estimate is of any time, and one that has not changed tells nothing.
        points = [after for before, after in pairwise(points) if before[1] != after[1]]
        if not points:
            return None
    last = points[-1]
    old = [point for point in points[:-1] if last[0] - point[0] >= SHORTEST]
    if not old:
        return None
    recent = [point for point in old if last[0] - point[0] <= WINDOW]
    first = recent[0] if recent else old[-1]
    return (first[1] - last[1]) / (last[0] - first[0])


def _figure(rate: float) -> str:
    if rate >= 1:
        return f"{rate:,.0f} rows per second"
    return f"{rate * 60:,.1f} rows per minute"
