"""What a worker reads of the orders: one query for all its processors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from dcl_processor import steady as time
from dcl_processor.clock import DatabaseNow

from .models import TEXT, Control, OperatorAction
from .orders import ALL, Subject, name_of, person
from .tables import alias, utc, waiting_for


@dataclass(frozen=True, slots=True)
class Orders:
    """What is ordered of one processor, orders for all processors included."""

    #: When the answer was there, and when the query was sent, by this process's monotonic clock.
    read_at: float
    asked_at: float
    seen: int = 0
    is_paused: bool = False
    stops: int = 0
    run_nows: int = 0
    failures: int = 0
    #: Seconds until a row may be tried, counted from ``read_at``; ``None``: the breaker is closed.
    opens_in: float | None = None

    @property
    def age(self) -> float:
        """Return how many seconds ago it was read."""
        return time.monotonic() - self.read_at

    @property
    def open_for(self) -> float:
        """Return the seconds for which the breaker is still open; 0: it is not, or half-open."""
        return 0.0 if self.opens_in is None else max(0.0, self.opens_in - self.age)


def read(names: Collection[str]) -> Mapping[str, Orders]:
    """Return the orders for each of these processors."""
    asked = time.monotonic()
    wanted = Control.objects.using(alias()).filter(processor__in=[ALL, *names])
    found = {row.processor: row for row in wanted.annotate(clock=DatabaseNow())}
    # Behind the query: a breaker's pause that was thought too short would end the run.
    now = time.monotonic()
    everywhere = found.get(ALL)
    return {name: _orders(now, asked, found.get(name), everywhere) for name in names}


def _orders(
    read_at: float, asked_at: float, own: Control | None, everywhere: Control | None
) -> Orders:
    both = [row for row in (own, everywhere) if row is not None]
    return Orders(
        read_at=read_at,
        asked_at=asked_at,
        seen=sum(row.revision for row in both),
        is_paused=any(is_paused(row) for row in both),
        stops=sum(row.stops for row in both),
        run_nows=sum(row.run_nows for row in both),
        failures=0 if own is None else own.failures,
        opens_in=None if own is None else _opens_in(own),
    )


def is_paused(row: Control) -> bool:
    """Return whether a row that was read with ``clock`` is paused at that time."""
    until = row.paused_until
    return row.paused_at is not None and (until is None or until > row.clock)  # type: ignore[attr-defined]  # an annotation


def _opens_in(row: Control) -> float | None:
    until, now = utc(row.open_until), utc(row.clock)  # type: ignore[attr-defined]  # as above
    return None if until is None or now is None else (until - now).total_seconds()


# --- what operators have done to rows with the command: who, when, and to which rows


@dataclass(frozen=True, slots=True)
class RecordedAction:
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

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, which ``json.dumps()`` accepts; times as ISO 8601."""
        return {**asdict(self), "at": self.at.isoformat()}


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
    return [_recorded(row) for row in found[:limit]]


def _recorded(row: OperatorAction) -> RecordedAction:
    at = utc(row.at)
    assert at is not None
    texts = {name: getattr(row, name) for name in ("keys", "values", "reason", "error")}
    return RecordedAction(row.processor, row.action, row.by, at, row.rows, **texts)
