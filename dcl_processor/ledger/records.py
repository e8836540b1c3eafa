"""What runs and operators have done, and how processors stand now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.conf import settings
from django.db.models import Q, QuerySet

from dcl_processor.clock import DatabaseNow, Later, utc, utc_text
from dcl_processor.report.report import TRIED
from dcl_processor.report.values import TEN_YEARS, as_timedelta, expect_seconds

from .models import TEXT, Control, Look, OperatorAction, Plain, RecordedRun, alias, bounded_wait
from .orders import ALL, Subject, is_paused, name_of, person
from .recording import KEPT

R = TypeVar("R", bound=Plain)

#: Seconds without a heartbeat after which a run is shown as lost. Nothing else follows from it:
#: leases and locks decide which rows are free.
LOST_AFTER = 60.0

#: For how long a record is kept, unless the settings say otherwise.
KEEP = timedelta(days=14)

#: Records that are deleted by one statement, and by one call.
CHUNK, MOST_PRUNED = 1_000, 20_000


@dataclass(frozen=True, slots=True)
class Recorded(Plain):
    """One start of a command, or one call of ``run()``; times are in UTC."""

    id: str
    processor: str
    kind: str
    host: str
    pid: int
    started_at: datetime
    heartbeat_at: datetime
    finished_at: datetime | None
    #: "running", "finished" or "lost".
    state: str
    counts: dict[str, int]
    #: Rows tried per second since the start.
    rate: float
    stopped: str
    error: str
    workers: list[dict[str, Any]]


def history(processor: Subject | None = None, *, limit: int = 50) -> list[Recorded]:
    """Return the last records, the newest first.

    ``processor``: a processor, or its name; ``None``: all. ``limit``: the most records.
    """
    found = RecordedRun.objects.using(alias()).annotate(clock=DatabaseNow())
    if processor is not None:
        found = found.filter(processor=name_of(processor))
    return [_recorded(row) for row in found.order_by("-started_at")[:limit]]


def _state_of(row: Any) -> str:
    """Return the state of a record that was read with ``clock``."""
    if row.finished_at is not None:
        return "finished"
    return "lost" if row.heartbeat_at <= row.clock - timedelta(seconds=LOST_AFTER) else "running"


def _recorded(row: Any) -> Recorded:
    counts = {name: row.counts.get(name, 0) for name in KEPT}  # in their order
    tried = sum(counts[name] for name in TRIED)
    seconds = ((row.finished_at or row.heartbeat_at) - row.started_at).total_seconds()
    rate = tried / seconds if seconds > 0 else 0.0
    more = {"id": str(row.pk), "state": _state_of(row), "counts": counts, "rate": rate}
    return _read(row, Recorded, **more)


def _read(row: Any, kind: type[R], **more: Any) -> R:
    """Return the columns of a row that the class has, and more."""
    names = (each.name for each in fields(kind) if each.name not in more)
    values = {name: getattr(row, name) for name in names}
    times = {name: utc(value) for name, value in values.items() if isinstance(value, datetime)}
    return kind(**{**values, **times, **more})


@dataclass(frozen=True, slots=True)
class RecordedAction(Plain):
    """One ``requeue``, ``mark-done`` or ``discard`` of the command; the time is in UTC."""

    processor: str
    action: str
    by: str
    at: datetime
    rows: int
    keys: str
    values: str
    reason: str
    error: str


def add_action(processor: Subject, action: str, *, by: str = "", rows: int, **texts: str) -> None:
    """Record an action; ``texts``: ``keys``, ``values``, ``reason`` and ``error``."""
    name = name_of(processor)
    kept = {column: text[:TEXT] for column, text in texts.items()}
    with bounded_wait():
        OperatorAction.objects.using(alias()).create(
            processor=name, action=action, by=person(by), at=DatabaseNow(), rows=rows, **kept
        )


def actions(processor: Subject | None = None, *, limit: int = 50) -> list[RecordedAction]:
    """Return the last actions of operators, the newest first.

    ``processor``: a processor, or its name; ``None``: all. ``limit``: the most actions.
    """
    found = OperatorAction.objects.using(alias()).order_by("-at", "-pk")
    if processor is not None:
        found = found.filter(processor=name_of(processor))
    return [_read(row, RecordedAction) for row in found[:limit]]


def prune(older_than: timedelta | float | None = None) -> int:
    """Delete the records that began longer ago, and are not at work, and actions; return how many.

    ``older_than``: seconds (or a ``timedelta``); default: the setting
    ``DCL_PROCESSOR_LEDGER_KEEP``, or 14 days; with ``None`` as the setting nothing is deleted. In
    chunks, up to 20,000 of each: call it again for more. Commands call it now and then.
    """
    keep = older_than
    if keep is None:
        keep = getattr(settings, "DCL_PROCESSOR_LEDGER_KEEP", KEEP)
    if keep is None:
        return 0
    expect_seconds("expected DCL_PROCESSOR_LEDGER_KEEP", keep, most=TEN_YEARS)
    before = Later(-as_timedelta(keep))
    old = RecordedRun.objects.using(alias()).filter(started_at__lt=before)
    # A watch that began long ago is still at work while its heartbeat is younger than that.
    old = old.filter(Q(finished_at__isnull=False) | Q(heartbeat_at__lt=before))
    acted = OperatorAction.objects.using(alias())
    return _delete(RecordedRun.objects.using(alias()), old.order_by("started_at")) + _delete(
        acted, acted.filter(at__lt=before).order_by("at")
    )


def _delete(table: QuerySet[Any], old: QuerySet[Any]) -> int:
    deleted = 0
    while deleted < MOST_PRUNED:
        keys = list(old.values_list("pk", flat=True)[:CHUNK])
        if not keys:
            break
        table.filter(pk__in=keys).delete()
        deleted += len(keys)
    return deleted


# --- what is paused, and what is at work


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
    #: "running", "pausing" (a run is still at work) or "paused".
    phase: str = "running"
    pause: Pause | None = None
    #: The commands that are lost: their last heartbeat is more than a minute ago.
    lost: int = 0
    #: When each host has last looked for rows.
    looked_at: dict[str, datetime] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Return one line for people; empty if nothing keeps rows from starting."""
        return "" if self.pause is None else self._pause_in_words(self.pause)

    def _pause_in_words(self, pause: Pause) -> str:
        what = "all processors are paused" if pause.of_all else self.phase
        until = f", until {utc_text(pause.until)}" if pause.until else ""
        why = f": {pause.reason}" if pause.reason else ""
        lost = f" ({self.lost} lost)" if self.lost else ""
        return f"{what} since {utc_text(pause.since)} by {pause.by}{until}{why}{lost}"


def state(processor: Subject) -> State:
    """Return the state of one processor: what keeps its rows from starting, if anything."""
    return states([processor])[0]


def states(processors: Iterable[Subject]) -> list[State]:
    """Return the states of several processors, in this order; three queries for all of them."""
    names = [name_of(each) for each in processors]
    using = alias()
    wanted = Control.objects.using(using).filter(processor__in=[ALL, *names])
    rows = {row.processor: row for row in wanted.annotate(clock=DatabaseNow())}
    runs = RecordedRun.objects.using(using).filter(finished_at=None, processor__in=names)
    at_work = list(runs.annotate(clock=DatabaseNow()))
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
    alive = [run for run in runs if _state_of(run) == "running"]
    found: dict[str, Any] = {"lost": sum(_state_of(run) == "lost" for run in runs)}
    if paused:
        # The pause of all processors is named first, because it has to be ended first.
        row = min(paused, key=lambda row: row.processor)
        is_pausing = any(run.at_work for run in alive)
        found |= {"phase": "pausing" if is_pausing else "paused", "pause": _pause(row)}
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
