"""What is paused, who has seen it, and what is at work; for the command, the admin and code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db.models import Case, Q, Value, When

from dcl_processor.clock import DatabaseNow

from .models import Control, Look, RecordedRun
from .orders import ALL, Subject, is_paused, name_of
from .records import live
from .tables import Plain, alias, utc


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
class State(Plain):
    """What the ledger has of one processor now; times are in UTC."""

    name: str
    #: "running", "pausing" (commands are still at work) or "paused".
    phase: str = "running"
    pause: Pause | None = None
    #: The commands at work since the pause, how many of them have seen it, and how many of all are
    #: lost: their last heartbeat is more than a minute ago.
    commands: int = 0
    seen: int = 0
    lost: int = 0
    #: Failures in a row, on all machines; and until when the breaker lets no row start.
    failures: int = 0
    open_until: datetime | None = None
    #: "closed", "open", or "half-open": one row may be tried.
    breaker: str = "closed"
    #: When each host has last looked for rows.
    looked_at: dict[str, datetime] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Return one line for people; empty if nothing keeps rows from starting."""
        if self.pause is not None:
            return self._pause_in_words(self.pause)
        if self.breaker == "open" and self.open_until is not None:
            return (
                f"the breaker is open until {_time(self.open_until)}, after {self.failures} "
                "failures in a row"
            )
        return "the breaker lets one row be tried" if self.breaker == "half-open" else ""

    def _pause_in_words(self, pause: Pause) -> str:
        what = "all processors are paused" if pause.of_all else self.phase
        until = f", until {_time(pause.until)}" if pause.until else ""
        why = f": {pause.reason}" if pause.reason else ""
        seen = ""
        if self.phase == "pausing":
            seen = f" ({self.seen} of {self.commands} commands have seen it)"
        lost = f" ({self.lost} lost)" if self.lost else ""
        return f"{what} since {_time(pause.since)} by {pause.by}{until}{why}{seen}{lost}"


def state(processor: Subject) -> State:
    """Return the state of one processor: what keeps its rows from starting, if anything."""
    return states([processor])[0]


def states(processors: Iterable[Subject]) -> list[State]:
    """Return the states of several processors, in this order; three queries for all of them."""
    names = [name_of(each) for each in processors]
    using = alias()
    wanted = Control.objects.using(using).filter(processor__in=[ALL, *names])
    rows = {row.processor: row for row in wanted.annotate(clock=DatabaseNow())}
    since = min((row.paused_at for row in rows.values() if row.paused_at), default=None)
    recent = Q(finished_at=None)
    if since is not None:
        recent |= Q(finished_at__gte=since)  # those that have ended since the pause have seen it
    runs = RecordedRun.objects.using(using).filter(recent, processor__in=names)
    at_work = list(runs.annotate(is_live=Case(When(live(), then=Value(1)), default=Value(0))))
    looks = list(Look.objects.using(using).filter(processor__in=names))
    return [
        _state(
            name,
            [row for each in (name, ALL) if (row := rows.get(each)) is not None],
            [run for run in at_work if run.processor == name],
            [look for look in looks if look.processor == name],
        )
        for name in names
    ]


def _state(name: str, rows: list[Any], runs: list[Any], looks: list[Look]) -> State:
    paused = [row for row in rows if is_paused(row)]
    own = next((row for row in rows if row.processor == name), None)
    alive = [run for run in runs if run.finished_at is None and run.is_live]
    lost = [run for run in runs if run.finished_at is None and not run.is_live]
    found: dict[str, Any] = {"lost": len(lost)}
    if paused:
        # The pause of all processors is named first, because it has to be ended first.
        row = min(paused, key=lambda row: row.processor)
        seen = sum(each.revision for each in rows)
        ended = [run for run in runs if run.finished_at and run.finished_at >= row.paused_at]
        have_seen = [run for run in alive if run.seen >= seen]
        # A command that has not read the pause may start a row. A command that has read it may
        # still handle a row.
        not_yet = [run for run in alive if run.seen < seen or run.at_work]
        found |= {
            "phase": "pausing" if not_yet else "paused",
            "pause": _pause(row),
            "commands": len(alive) + len(ended),
            "seen": len(have_seen) + len(ended),
        }
    if own is not None:
        found |= _breaker(own)
    return State(name, looked_at={look.host: utc(look.looked_at) for look in looks}, **found)


def _pause(row: Any) -> Pause:
    return Pause(
        since=utc(row.paused_at),
        seconds=round((utc(row.clock) - utc(row.paused_at)).total_seconds(), 3),
        by=row.paused_by,
        reason=row.reason,
        until=utc(row.paused_until),
        of_all=row.processor == ALL,
    )


def _breaker(row: Any) -> dict[str, Any]:
    if row.open_until is None:
        return {"failures": row.failures}
    until = utc(row.open_until)
    kind = "open" if until > utc(row.clock) else "half-open"
    return {"failures": row.failures, "open_until": until, "breaker": kind}


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
