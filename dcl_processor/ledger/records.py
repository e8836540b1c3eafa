"""What runs and operators have done, and for how long that is kept."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, TypeVar

from django.conf import settings
from django.db.models import Q, QuerySet

from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.values import TEN_YEARS, as_timedelta, expect_seconds

from .models import TEXT, OperatorAction, RecordedRun
from .orders import Subject, name_of, person
from .recording import KEPT
from .tables import Plain, alias, utc, waiting_for

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
    handler_seconds: float
    slowest: float
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


def live() -> Q:
    """Return the condition of records that are not finished, and not lost."""
    return Q(finished_at=None, heartbeat_at__gt=Later(timedelta(seconds=-LOST_AFTER)))


def _recorded(row: Any) -> Recorded:
    lost = row.heartbeat_at <= row.clock - timedelta(seconds=LOST_AFTER)
    unfinished = "lost" if lost else "running"
    state = unfinished if row.finished_at is None else "finished"
    counts = {name: getattr(row, name) for name in KEPT}
    return _read(row, Recorded, id=str(row.pk), state=state, counts=counts)


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
    with waiting_for(name):
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
