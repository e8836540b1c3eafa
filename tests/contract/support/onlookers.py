"""Observers of runs, and what a project exports, for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from dcl_processor import observers
from dcl_processor.contrib import otel
from dcl_processor.observers import Observer


@contextmanager
def looking_on(*given: Observer) -> Iterator[None]:
    for each in given:
        observers.add(each)
    try:
        yield
    finally:
        for each in given:
            observers.remove(each)


class Discarding(SpanExporter):
    """Sends nothing, and keeps nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


@contextmanager
def exporting() -> Iterator[None]:
    """Make spans and metrics, as a project does."""
    tracers = TracerProvider()
    tracers.add_span_processor(BatchSpanProcessor(Discarding()))
    meters = MeterProvider([InMemoryMetricReader()])
    otel.instrument(tracer_provider=tracers, meter_provider=meters)
    try:
        yield
    finally:
        otel.uninstrument()
        tracers.shutdown()
        meters.shutdown()
