"""Processors that try errands again, and how long the errands are to wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from dcl_processor import BatchProcessor, Retry
from dcl_processor.pending.clock import DatabaseNow
from tests.contract.support import errands as the
from tests.models import Errand

HOUR = 3600


def retrying(handler: Callable[[Errand], Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that tries a row again after an hour."""
    return the.transactional(handler, **{"retry": Retry(backoff=HOUR, jitter=0), **options})


def delay(place: int) -> float:
    """Return the seconds until the row is due, by the database's clock."""
    row = Errand.objects.annotate(now=DatabaseNow()).get(place=place)
    assert row.next_attempt_at is not None
    return float((row.next_attempt_at - row.now).total_seconds())


def make_due() -> None:
    Errand.objects.update(next_attempt_at=DatabaseNow() - timedelta(seconds=1))


def fail(row: Errand) -> None:
    Errand.objects.filter(pk=row.pk).update(result="worked")
    if row.place == 1:
        raise ValueError("no such place")
