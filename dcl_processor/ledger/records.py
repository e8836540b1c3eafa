"""What runs have done, and for how long that is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet

from dcl_processor.clock import DatabaseNow, Later
from dcl_processor.values import TEN_YEARS, as_timedelta, expect_seconds

from .models import OperatorAction, RecordedRun
from .orders import Subject, name_of
from .recording import KEPT
from .tables import alias, utc

#: Seconds without a heartbeat after which a run is shown as lost. Nothing else follows from it:
#: leases and locks decide which rows are free.
LOST_AFTER = 60.0

#: For how long a record is kept, unless the settings say otherwise.
KEEP = timedelta(days=14)

#: Records that are deleted by one statement, and by one call.
CHUNK, MOST_PRUNED = 1_000, 20_000


@dataclass(frozen=True, slots=True)
class Recorded:
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

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``json.dumps()`` accepts; times as ISO 8601."""
        found = asdict(self)
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in found.items()
        }


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
    started, heartbeat = utc(row.started_at), utc(row.heartbeat_at)
    assert started is not None
    assert heartbeat is not None
    return Recorded(
        id=str(row.pk),
        processor=row.processor,
        kind=row.kind,
        host=row.host,
        pid=row.pid,
        started_at=started,
        heartbeat_at=heartbeat,
        finished_at=utc(row.finished_at),
        state=unfinished if row.finished_at is None else "finished",
        counts={name: getattr(row, name) for name in KEPT},
        handler_seconds=row.handler_seconds,
        slowest=row.slowest,
        rate=row.rate,
        stopped=row.stopped,
        error=row.error,
        workers=row.workers,
    )


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
