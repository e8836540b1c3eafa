"""Parcels, and processors of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcl_processor import BatchProcessor, batch_processor
from tests.models import Parcel

UNSENT = Parcel.objects.filter(sent=False)


def parcels(number: int, **columns: Any) -> list[Parcel]:
    """Make parcels whose ``priority`` is their place, unless told otherwise."""
    rows = [Parcel(**{"priority": place, **columns}) for place in range(number)]
    return Parcel.objects.bulk_create(rows)


def processor(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Parcel]:
    """Make a processor of the parcels that are not sent, one by one unless told otherwise."""
    options = {"pending": UNSENT, "done": {"sent": True}, **options}
    return batch_processor(**options)(handler)


def in_batches(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Parcel]:
    """Make a processor of all parcels in one batch, unless told otherwise."""
    return processor(handler, **{"batch_size": 100, **options})
