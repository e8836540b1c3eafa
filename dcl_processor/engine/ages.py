"""How long rows were pending before their claim, as far as it can be known without a query."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.utils import timezone

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


def pending_ages(processor: Definition[Any], rows: Iterable[Any]) -> list[float]:
    """Return the seconds since each row's ``pending_since``, by this process's clock.

    Only where it names a column that the rows were loaded with; a row without a time has no age. A
    clock that differs from the database's gives no age below 0.
    """
    since = processor.pending_since
    if not isinstance(since, str):
        return []
    times = [vars(row).get(since) for row in rows]
    return [_age(each) for each in times if isinstance(each, datetime)]


def _age(since: datetime) -> float:
    now = timezone.now()
    if since.tzinfo is None and now.tzinfo is not None:
        since = timezone.make_aware(since)
    elif since.tzinfo is not None and now.tzinfo is None:
        now = timezone.make_aware(now)
    return max(0.0, (now - since).total_seconds())
