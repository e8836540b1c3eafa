"""This package: asynchronous handlers in flight, and the rows of each key one after the other."""

from __future__ import annotations

from typing import Any

from dcl_processor import Delivery, Lease, batch_processor
from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill_keys as prepare
from tests.benchmarks.rows import left
from tests.models import Errand

__all__ = ["drain", "left", "prepare"]


def drain(workers: int, *, concurrency: int, **run: Any) -> Drained:
    @batch_processor(
        pending=lambda: Errand.objects.filter(done=False),
        done={"done": True},
        max_pending=None,
        delivery=Delivery.AT_LEAST_ONCE,
        lease=Lease(60),
        group_by="place",
        in_order=True,
        concurrency=concurrency,
    )
    async def errands(row: Errand) -> None:
        await handling.handle_soon(row.pk)

    report = errands(wait_for_locked=60, **run)
    report.raise_for_failures()
    return Drained(report.processed)
