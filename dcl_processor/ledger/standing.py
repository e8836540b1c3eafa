"""How processors stand now: paused or not, how fast their rows are handled, and when last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Max, Min, Q, Sum

from dcl_processor.ledger.control import PAUSED
from dcl_processor.ledger.models import ALL, Subject, controls, name_of, plain, records
from dcl_processor.ledger.records import RUN
from dcl_processor.operator.times import utc, utc_text
from dcl_processor.pending.clock import DatabaseNow, Later

#: The runs that the rate is computed from, and the fewest seconds that it is computed for.
LATELY, LEAST = timedelta(minutes=10), 1.0


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

    ``rate``: rows a second that all machines together tried, in the runs that were seen in the last
    ten minutes; ``None``: none. ``last_run``: when a run was seen last.
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
    """Return the states of several processors, in this order; two queries for all of them."""
    names = [name_of(each) for each in processors]
    paused = controls().filter(PAUSED, processor__in=[ALL, *names]).annotate(clock=DatabaseNow())
    pauses = {row.processor: _pause(row) for row in paused}
    late = Q(seen_at__gt=Later(-LATELY), rows__gt=0)
    runs = records().filter(processor__in=names, action=RUN).order_by().values("processor")
    seen = runs.annotate(
        last=Max("seen_at"),
        began=Min("at", filter=late),
        ended=Max("seen_at", filter=late),
        tried=Sum("rows", filter=late),
    )
    found = {each["processor"]: each for each in seen}
    return [
        # The pause of all processors is named first, because it has to be ended first.
        State(name, pauses.get(ALL) or pauses.get(name), *_pace(found.get(name)))
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


def _pace(seen: Any) -> tuple[float | None, datetime | None]:
    """Return the rows a second, and when a run was seen last."""
    if seen is None:
        return None, None
    if seen["tried"] is None:
        return None, utc(seen["last"])
    span = (seen["ended"] - seen["began"]).total_seconds()
    return seen["tried"] / max(span, LEAST), utc(seen["last"])
