"""What the copies race with: functions of a handler that give a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import F

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from tests.models import Entry, Errand, Parcel


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
    return _chat(handle, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(60))
