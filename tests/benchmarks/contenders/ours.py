"""This package."""

from __future__ import annotations

from typing import Any

from dcl_processor import Delivery, Lease, batch_processor
from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import left
from tests.models import Errand

__all__ = ["drain", "left", "prepare"]


def drain(workers: int, *, delivery: str, batch_size: int, failing: int = 0, **run: Any) -> Drained:
    """Run once; ``failing``: of a hundred rows; ``run``: the parameters of ``run()``."""
    handle = handling.handle
    options: dict[str, Any] = {"lease": Lease(60)} if delivery == Delivery.AT_LEAST_ONCE else {}

    @batch_processor(
        pending=lambda: Errand.objects.filter(done=False),
        done={"done": True},
        max_pending=None,
        delivery=Delivery(delivery),
        batch_size=batch_size,
        **options,
    )
    def errands(row: Errand) -> None:
        handle(row.pk)
        if row.pk % 100 < failing:
            raise ValueError(row.pk)

    report = errands(wait_for_locked=60, **run)
    if not failing:
        report.raise_for_failures()
    return Drained(report.processed)
