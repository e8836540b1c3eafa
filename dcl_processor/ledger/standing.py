"""How processors stand now: paused or not, how fast their rows are handled, and when last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Max

from dcl_processor.ledger.models import ALL, Subject, controls, name_of, plain, records
from dcl_processor.ledger.pausing import PAUSED
from dcl_processor.ledger.records import RUN
from dcl_processor.operator.times import utc, utc_text
from dcl_processor.pending.clock import DatabaseNow, Later

#: Seconds whose runs the rate is computed from, and the fewest that it is computed for.
LATELY, LEAST = 600.0, 1.0


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause; ``seconds``: how long it has lasted; ``of_all``: it is that of all processors."""

    since: datetime
    seconds: float
    by: str
    reason: str
    until: datetime | None
    of_all: bool


@dataclass(frozen=True, slots=True)
class State:
    """What the ledger has of one processor now; times are in UTC.

    ``rate``: rows that all machines together tried in a second, of the last ten minutes, or since
    the first run in these; ``None``: none. ``last_run``: when a run was seen last.
    """

    name: str
    pause: Pause | None = None
    rate: float | None = None
    last_run: datetime | None = None

    @property
    def is_paused(self) -> bool:
        """Whether no row may start."""
        return self.pause is not None

    @property
    def sentence(self) -> str:
        """Return one line for people; empty if nothing keeps rows from starting."""
        if (pause := self.pause) is None:
            return ""
        what = "all processors are paused" if pause.of_all else "paused"
        until = f", until {utc_text(pause.until)}" if pause.until else ""
        why = f": {pause.reason}" if pause.reason else ""
        return f"{what} since {utc_text(pause.since)} by {pause.by}{until}{why}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``json.dumps()`` accepts; times as ISO 8601."""
        return plain(asdict(self))


def state(processor: Subject) -> State:
    """Return the state of one processor."""
    return states([processor])[0]


def states(processors: Iterable[Subject]) -> list[State]:
    """Return the states of several processors, in this order; three queries for all of them."""
    names = [name_of(each) for each in processors]
    paused = controls().filter(PAUSED, processor__in=[ALL, *names]).annotate(clock=DatabaseNow())
    pauses = {row.processor: _pause(row) for row in paused}
    runs = records().filter(processor__in=names, action=RUN)
    last = dict(runs.order_by().values_list("processor").annotate(Max("seen_at")))
    rates = _rates(runs)
    return [
        # The pause of all processors is named first, because it has to be ended first.
        State(name, pauses.get(ALL) or pauses.get(name), rates.get(name), utc(last.get(name)))
        for name in names
    ]


def _pause(row: Any) -> Pause:
    return Pause(
        since=utc(row.paused_at),
        seconds=round((utc(row.clock) - utc(row.paused_at)).total_seconds(), 3),
        by=row.paused_by,
        reason=row.reason,
        until=utc(row.paused_until),
        of_all=row.processor == ALL,
    )


def _rates(runs: Any) -> dict[str, float]:
    """Return the rows a second of each processor; of a longer run the part that is lately."""
    lately = runs.filter(seen_at__gt=Later(timedelta(seconds=-LATELY)), rows__gt=0)
    rows: dict[str, float] = {}
    spans: dict[str, float] = {}
    columns = ("processor", "at", "seen_at", "rows", "clock")
    for name, at, seen_at, number, clock in lately.annotate(clock=DatabaseNow()).values_list(
        *columns
    ):
        began, ended = ((clock - each).total_seconds() for each in (at, seen_at))
        part = (min(began, LATELY) - ended) / (began - ended) if began > LATELY else 1.0
        rows[name] = rows.get(name, 0.0) + number * part
        spans[name] = max(spans.get(name, LEAST), min(began, LATELY))
    return {name: number / spans[name] for name, number in rows.items()}
