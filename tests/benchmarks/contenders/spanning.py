"""This package, with a question that asks a second table."""

from __future__ import annotations

from dcl_processor import batch_processor
from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill_spanning as prepare
from tests.benchmarks.rows import left_spanning as left
from tests.models import Parcel

__all__ = ["drain", "left", "prepare"]


def drain(workers: int) -> Drained:
    handle = handling.handle

    @batch_processor(
        pending=lambda: Parcel.objects.filter(sent=False, depot__open=True),
        done={"sent": True},
        max_pending=None,
    )
    def parcels(row: Parcel) -> None:
        handle(row.pk)

    return Drained(parcels(wait_for_locked=60).raise_for_failures().processed)
