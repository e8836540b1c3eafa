"""This package: by a call, by the command, and with keys in order."""

from __future__ import annotations

from io import StringIO
from typing import Any

from django.core.management import call_command

from dcl_processor import Delivery, Lease, batch_processor
from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import fill_keys, left
from tests.models import Errand

__all__ = ["drain", "drain_command", "drain_in_order", "fill_keys", "left", "prepare"]

COMMON: dict[str, Any] = {
    "pending": lambda: Errand.objects.filter(done=False),
    "done": {"done": True},
}


def drain(*, batch_size: int) -> Drained:
    handle = handling.handle

    @batch_processor(**COMMON, batch_size=batch_size)
    def errands(row: Errand) -> None:
        handle(row.pk)

    return Drained(errands(wait_for_locked=60).raise_for_failures().processed)


def drain_command() -> Drained:
    """Run the command in this process, so that starting Python costs nothing."""
    call_command("processors", "run", "benchmarks.transactional", stdout=StringIO())
    return Drained()


def drain_in_order() -> Drained:
    """Have twenty asynchronous handlers in flight, and the rows of each key one by one."""
    leased: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}

    @batch_processor(**COMMON, **leased, group_by="place", in_order=True, concurrency=20)
    async def errands(row: Errand) -> None:
        await handling.handle_soon(row.pk)

    return Drained(errands(wait_for_locked=60).raise_for_failures().processed)
