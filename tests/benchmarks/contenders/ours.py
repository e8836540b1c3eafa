"""This package: by a call, by the command, watched, and with keys in order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.test import override_settings

from dcl_processor import Delivery, Lease, batch_processor
from dcl_processor.report.observer import observers_installed
from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import fill_keys, left
from tests.models import Errand

__all__ = ["drain", "fill_keys", "left", "prepare"]

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


def drain_watched() -> Drained:
    """Note all that can be noted of each run and row: the ledger, metrics and traces."""
    from prometheus_client import CollectorRegistry

    from dcl_processor.contrib.prometheus import Counts

    counts = Counts(CollectorRegistry())
    observers_installed.append(look_on := lambda _: counts)
    try:
        with override_settings(DCL_PROCESSOR_LEDGER=True), exporting():
            return drain(batch_size=1)
    finally:
        observers_installed.remove(look_on)


@contextmanager
def exporting() -> Iterator[None]:
    """Make spans, as a project does, and send them nowhere."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    from dcl_processor.contrib import otel

    with Path(os.devnull).open("w") as nowhere:
        tracers = TracerProvider()
        tracers.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=nowhere)))
        otel.instrument(tracer_provider=tracers)
        try:
            yield
        finally:
            otel.uninstrument()
            tracers.shutdown()


def drain_in_order() -> Drained:
    """Have twenty asynchronous handlers in flight, and the rows of each key one by one."""
    leased: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}

    @batch_processor(**COMMON, **leased, group_by="place", in_order=True, concurrency=20)
    async def errands(row: Errand) -> None:
        await handling.handle_soon(row.pk)

    return Drained(errands(wait_for_locked=60).raise_for_failures().processed)
