"""What the copies race with: functions of a handler that give a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
