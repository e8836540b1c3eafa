"""What the workers race with: functions of a handler that give a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from tests.models import Entry, Errand
from tests.waiting import PATIENCE


def _chat(handle: Callable[[Any], Any], **options: Any) -> BatchProcessor[Errand]:
    """Take the updates of each chat in their order, and append to a log."""
    pending = Errand.objects.filter(done=False, claimed=False)

    def update(row: Errand) -> None:
        Entry.objects.create(errand=row.pk, place=row.place, begins=True)
        handle(row)
        Entry.objects.create(errand=row.pk, place=row.place, begins=False)

    options = {"done": {"done": True, "claimed": False}, **options}
    return batch_processor(pending=pending, group_by="place", in_order=True, **options)(update)


def chat_transactional(handle: Callable[[Any], Any]) -> BatchProcessor[Errand]:
    return _chat(handle)


def chat_at_most_once(handle: Callable[[Any], Any]) -> BatchProcessor[Errand]:
    mark = {"claim": {"claimed": True}, "claimed_at": "claimed_at"}
    return _chat(handle, delivery=Delivery.AT_MOST_ONCE, **mark)


def chat_at_least_once(handle: Callable[[Any], Any]) -> BatchProcessor[Errand]:
    return _chat(handle, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(PATIENCE))
