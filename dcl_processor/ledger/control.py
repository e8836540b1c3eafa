"""The orders that hold on all machines, pause, resume and ``rate``, and how processors stand.

Each order is one statement. The database lets one of two sessions change the row, and the other one
learns that there was nothing to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Max, Min, Q, Sum
from django.db.models.functions import Coalesce, Greatest
from django.utils.timezone import is_naive, make_aware

from dcl_processor.ledger.models import (
    ALL,
    PERSON,
    TEXT,
    Subject,
    controls,
    name_of,
    plain,
    records,
)
from dcl_processor.ledger.records import RUN, add
from dcl_processor.operator.times import utc, utc_text
from dcl_processor.options.worker import this_user
from dcl_processor.pending.clock import DatabaseNow, Later
from dcl_processor.report.errors import shown
from dcl_processor.report.values import TEN_YEARS, expect_seconds

#: The rows whose pause has not ended, and the others.
PAUSED = Q(paused_at__isnull=False) & (Q(paused_until=None) | Q(paused_until__gt=DatabaseNow()))
FREE = Q(paused_at=None) | Q(paused_until__lte=DatabaseNow())

#: How far the rows of a ``rate`` may be ahead of it, as a run asks again after 0.1 seconds.
AHEAD = timedelta(seconds=0.2)

#: The runs that the rate is computed from, and the fewest seconds that it is computed for.
LATELY, LEAST = timedelta(minutes=10), 1.0


def pause(
    processor: Subject,
    *,
    reason: str = "",
    until: datetime | timedelta | float | None = None,
    by: str = "",
) -> bool:
    """Let no worker start a row of the processor; return whether it was not paused before.

    ``processor``: a processor, its name, or ``ALL``, for all processors at once, which is a pause
    of its own. ``reason``: for people. ``until``: the end of the pause: a ``datetime``, or seconds
    (or a ``timedelta``) from now; ``None``: ``resume()`` ends it. ``by``: who pauses it, default
    the user of this process and the host. A batch that is being handled is finished. A pause that
    is over, by its ``until``, is replaced; one that is not stays as it is.

    Raises ``InvalidOption`` for a value that is no time, or a time that is over.
    """
    by = by or this_user()
    values = {
        "paused_at": DatabaseNow(),
        "paused_until": _end(until),
        "paused_by": shown(by, PERSON),
        "reason": shown(reason, TEXT),
    }
    # Race: two orders. The row's lock lets one of two pauses find that there is none yet.
    if not _change(name_of(processor), FREE, values):
        return False
    add(processor, "pause", by=by, reason=reason)
    return True


def resume(processor: Subject, *, by: str = "") -> bool:
    """End the pause of the processor; return whether it was paused.

    ``processor`` and ``by``: as for ``pause()``. After a pause of ``ALL``, those that were paused
    one by one stay paused.
    """
    ended = {"paused_at": None, "paused_until": None, "paused_by": "", "reason": ""}
    if not _change(name_of(processor), PAUSED, ended):
        return False
    add(processor, "resume", by=by)
    return True


def is_paused(name: str) -> bool:
    """Return whether no row of the processor may start."""
    return controls().filter(PAUSED, processor__in=[ALL, name]).exists()


def take(name: str, rate: float, wanted: int) -> int:
    """Return how many of so many rows may start now: at most those of a second, or none.

    The column ``free_at`` is the time by which all rows that have started were due.
    """
    number = min(wanted, max(1, int(rate)))
    now = DatabaseNow()
    due = Greatest(Coalesce("free_at", now), now)
    # Race: over the rate. Of two sessions the second one finds the time that the first has written.
    open_ = controls().filter(Q(free_at=None) | Q(free_at__lte=Later(AHEAD)), processor=name)
    taken = open_.update(free_at=due + timedelta(seconds=number / rate))
    if not taken:
        controls().get_or_create(processor=name)
    return number * taken


def _change(name: str, condition: Q, values: Mapping[str, Any]) -> int:
    """Change the row of a processor by one statement; return how many were changed: 1 or 0."""
    controls().get_or_create(processor=name)
    return controls().filter(condition, processor=name).update(**values)


def _end(until: datetime | timedelta | float | None) -> Later | None:
    if until is None:
        return None
    fix = "; give a time to come, or seconds from now"
    left: Any = until
    if isinstance(until, datetime):
        left = (make_aware(until) if is_naive(until) else until) - datetime.now(UTC)
    seconds = expect_seconds("expected until", left, most=TEN_YEARS, above_zero=True, fix=fix)
    return Later(timedelta(seconds=seconds))


# --- how processors stand: paused or not, how fast their rows are handled, and when last


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
