"""This package: alone, and with what costs it something beside its rows."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db.models import F
from django.test import override_settings

from dcl_processor import Delivery, Lease, batch_processor
from dcl_processor.report.observer import observers_installed
from tests.benchmarks import handling
from tests.benchmarks.contenders import FAILING, Drained
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import fill_keys, fill_spanning, left, left_spanning
from tests.models import Errand, Parcel

__all__ = ["drain", "fill_keys", "fill_spanning", "left", "left_spanning", "prepare"]

COMMON: dict[str, Any] = {
    "pending": lambda: Errand.objects.filter(done=False),
    "done": {"done": True},
}
LEASED: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}


def drain(workers: int, *, delivery: str, batch_size: int, failing: int = 0, **run: Any) -> Drained:
    """Run once; ``failing``: of a hundred rows; ``run``: the parameters of ``run()``."""
    handle = handling.handle
    options = LEASED if delivery == Delivery.AT_LEAST_ONCE else {"delivery": Delivery(delivery)}

    @batch_processor(**COMMON, **options, batch_size=batch_size)
    def errands(row: Errand) -> None:
        handle(row.pk)
        if row.pk % 100 < failing:
            raise ValueError(row.pk)

    report = errands(wait_for_locked=60, **run)
    if not failing:
        report.raise_for_failures()
    return Drained(report.processed)


def drain_command(workers: int) -> Drained:
    """Run the command in this process, so that starting Python costs nothing."""
    call_command("processors", "run", "benchmarks.transactional", stdout=StringIO())
    return Drained()


def drain_spanning(workers: int) -> Drained:
    """Ask a second table."""
    handle = handling.handle

    @batch_processor(
        pending=lambda: Parcel.objects.filter(sent=False, depot__open=True), done={"sent": True}
    )
    def parcels(row: Parcel) -> None:
        handle(row.pk)

    return Drained(parcels(wait_for_locked=60).raise_for_failures().processed)


def drain_in_order(workers: int, *, concurrency: int, **run: Any) -> Drained:
    """Have asynchronous handlers in flight, and the rows of each key one after the other."""

    @batch_processor(**COMMON, **LEASED, group_by="place", in_order=True, concurrency=concurrency)
    async def errands(row: Errand) -> None:
        await handling.handle_soon(row.pk)

    return Drained(errands(wait_for_locked=60, **run).raise_for_failures().processed)


def drain_failing(workers: int) -> Drained:
    """Have some rows fail: each costs a traceback and a line in the log."""
    logger = logging.getLogger("dcl_processor")
    with Path(os.devnull).open("w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        logger.addHandler(handler)
        try:
            return drain(workers, delivery="transactional", batch_size=100, failing=FAILING)
        finally:
            logger.removeHandler(handler)


def left_failing() -> int:
    """Count what is pending beyond the rows that fail."""
    rows = Errand.objects.annotate(part=F("pk") % 100)
    return left() - rows.filter(part__lt=FAILING).count()


def drain_watched(workers: int) -> Drained:
    """Note all that can be noted of each run and row: the ledger, metrics and traces."""
    from prometheus_client import CollectorRegistry

    from dcl_processor.contrib.prometheus import Counts

    counts = Counts(CollectorRegistry())
    observers_installed.append(look_on := lambda _: counts)
    try:
        with override_settings(DCL_PROCESSOR_LEDGER=True), exporting():
            return drain(workers, delivery="transactional", batch_size=1)
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
