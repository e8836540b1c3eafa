"""What the copies race with: functions of a handler that give a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import F

from dcl_processor import BatchProcessor, batch_processor
from tests.models import Parcel


def own_table(handle: Callable[[Any], Any]) -> BatchProcessor[Parcel]:
    """Ask about the row's own columns: one statement locks and asks again."""
    pending = Parcel.objects.filter(sent=False)
    return batch_processor(pending=pending, done={"sent": True})(handle)


def spanning(handle: Callable[[Any], Any]) -> BatchProcessor[Parcel]:
    """Ask across a join: a second statement asks again."""
    pending = Parcel.objects.filter(sent=False, depot__open=True).select_related("depot")
    return batch_processor(pending=pending, done={"sent": True})(handle)


def batches(handle: Callable[[Any], Any]) -> BatchProcessor[Parcel]:
    """Take twenty rows at a time, and write something for each."""
    pending = Parcel.objects.filter(sent=False)

    def work(row: Parcel) -> None:
        handle(row)
        Parcel.objects.filter(pk=row.pk).update(tries=F("tries") + 1)

    return batch_processor(pending=pending, done={"sent": True}, batch_size=20)(work)
