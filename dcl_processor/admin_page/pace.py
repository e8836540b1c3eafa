"""How fast the pending rows become fewer, from the counts that the page has shown before.

Nothing is stored: the link that refreshes the page carries the counts, so that the bar, the rate
and the chart work without a script.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from django.core import signing

from dcl_processor.insights.answer import Answer, How
from dcl_processor.values import span

#: A time in seconds since 1970, and the pending rows then.
Point = tuple[float, int]

#: Looks that a link carries for many processors, and for one alone. Servers refuse addresses of
#: more than 4,094 characters.
FEW, MANY = 2, 40

#: Seconds over which a rate is computed, and the shortest time that gives one.
WINDOW, SHORTEST = 120.0, 0.5


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
    def words(self) -> str:
        """Return the rate, and the time that the rest takes at this rate."""
        if self.rate is None:
            return "The rate is known from the second look on."
        if self.rate == 0:
            return "The number has not changed."
        if self.rate < 0:
            return f"Falling behind by {_figure(-self.rate)}."
        return f"{_figure(self.rate)}; about {span(self.now / self.rate)} left at this rate."


def pace(before: Sequence[Point], now: float, pending: Answer[int]) -> Pace:
    """Return the pace after another count, which may be none."""
    known = tuple(point for point in before if point[0] < now)
    if pending.value is None or pending.how is not How.EXACT:
        return Pace(None, known, None)
    points = (*known, (round(now, 1), pending.value))
    return Pace(max(count for _, count in points), points, _rate(points))


def text_of(seen: Mapping[str, Sequence[Point]], most: int) -> str:
    """Return the counts of processors for an address: of the first look, and of the latest."""
    kept = [[*points[:1], *points[1:][1 - most :]] for points in seen.values()]
    return signing.dumps(kept, salt=_salt(seen), compress=True)


def parse(text: str, names: Collection[str]) -> dict[str, tuple[Point, ...]]:
    """Return the counts by processor that an address carries; empty if it is of other names."""
    try:
        written = signing.loads(text, salt=_salt(names))
    except signing.BadSignature:
        return {}
    each = zip(names, written, strict=True)
    return {name: tuple((at, count) for at, count in points) for name, points in each}


def _salt(names: Iterable[str]) -> str:
    return f"dcl_processor.admin_page.pace.{json.dumps([*names])}"


def _rate(points: Sequence[Point]) -> float | None:
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
