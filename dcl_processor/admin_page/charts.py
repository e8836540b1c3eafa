"""Charts as SVG, drawn on the server: attributes alone, which a strict policy allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

WIDTH, HEIGHT = 600, 120

#: Room for the line's own width.
_MARGIN = 4

#: Rows of the table beside a chart.
MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart; ``points``: for ``<polyline>``; ``table``: the same numbers for readers."""

    key: str
    title: str
    unit: str
    points: str
    highest: str
    table: tuple[tuple[datetime, str], ...]
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def summary(self) -> str:
        """Return what the chart shows, in words."""
        (first, start), (last, end) = self.table[0], self.table[-1]
        return (
            f"{self.title}: {start} at {_time(first)}, {end} at {_time(last)} UTC, "
            f"{self.highest} at most."
        )

    @property
    def rows(self) -> list[tuple[datetime, str, str]]:
        """Return the rows of the table: a time, the same for people, and the figure."""
        return [(at, _time(at), figure) for at, figure in self.table]


def chart(key: str, title: str, unit: str, values: Sequence[tuple[float, float]]) -> Chart | None:
    """Return the chart of values over time, the oldest first; ``None`` for fewer than two.

    ``values``: seconds since 1970, and a number from 0 up.
    """
    if len(values) < 2:
        return None
    start, end = values[0][0], values[-1][0]
    highest = max(value for _, value in values)
    across = (WIDTH - 2 * _MARGIN) / ((end - start) or 1)
    up = (HEIGHT - 2 * _MARGIN) / (highest or 1)
    points = " ".join(
        f"{_MARGIN + (at - start) * across:.1f},{HEIGHT - _MARGIN - value * up:.1f}"
        for at, value in values
    )
    step = -(-len(values) // MOST_ROWS)
    shown = [*values[::step]]
    shown = shown if shown[-1] == values[-1] else [*shown, values[-1]]
    table = tuple((datetime.fromtimestamp(at, UTC), _figure(value)) for at, value in shown)
    return Chart(key, title, unit, points, _figure(highest), table)


def _time(at: datetime) -> str:
    """Write a time, with its date unless it is of today: a recorded run may be two weeks old."""
    is_today = at.date() == datetime.now(UTC).date()
    return f"{at:%H:%M:%S}" if is_today else f"{at:%Y-%m-%d %H:%M:%S}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:,.2g}"
