"""What operators have done to rows with the command: who, when, and to which rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from dcl_processor.clock import DatabaseNow

from .models import TEXT, OperatorAction
from .orders import Subject, name_of, person
from .tables import alias, utc, waiting_for


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
