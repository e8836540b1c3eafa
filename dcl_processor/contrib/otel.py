"""Traces and metrics for OpenTelemetry; the extra ``otel`` has its API, the project the SDK.

The span of a row is the current one in its handler, so that the spans of its SQL and HTTP calls are
its children. Each worker is a process of its own, and exports for itself: call ``instrument()`` in
the ``ready()`` of an app, which is called in each of them.

Names follow the conventions for messaging, version 1.44, which are still in development; what these
do not have begins with ``dcl_processor.``. A row's span is the root of a trace, and links to the
span of its run, because a run of a million rows is not one trace. A run without a row has none.

A failure is the status of its span; the log record has its traceback, ``run_id`` and ``pk``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django.utils import timezone
from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from dcl_processor import __version__
from dcl_processor.contrib import AGES, DURATIONS
from dcl_processor.options import worker
from dcl_processor.report.errors import describe, shown
from dcl_processor.report.observer import RowEvent, RunEvent, observers_installed
from dcl_processor.report.report import TRIED

SYSTEM, OPERATION = "dcl_processor", "process"
LONGEST = 200  # characters of an error's text that a span has

_instrumented: Instruments | None = None


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    row_ids: bool = True,
) -> None:
    """Make spans and metrics of the runs in this process; a further call does nothing.

    The providers are those of the project by default. ``row_ids``: spans have the primary key of
    their row; metrics never have it.
    """
    global _instrumented  # noqa: PLW0603  # one per process, as the providers are
    if _instrumented is None:
        _instrumented = Instruments(tracer_provider, meter_provider, row_ids=row_ids)
        observers_installed.append(_telemetry)


def uninstrument() -> None:
    """Make no spans and metrics of runs that begin from now on in this process."""
    global _instrumented  # noqa: PLW0603  # as above
    if _instrumented is not None:
        observers_installed.remove(_telemetry)
        _instrumented = None


def _telemetry(_: Any) -> Telemetry | None:
    return None if _instrumented is None else Telemetry(_instrumented)


class Instruments:
    """What records spans and metrics, with the providers of the project."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        *,
        row_ids: bool,
    ) -> None:
        self.row_ids = row_ids
        self.tracer = trace.get_tracer(SYSTEM, __version__, tracer_provider)
        meter = metrics.get_meter(SYSTEM, __version__, meter_provider)
        seconds = partial(meter.create_histogram, unit="s")
        self.duration = seconds(
            "messaging.process.duration",
            description="Seconds that the call of a row's handler took.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self.age = seconds(
            "dcl_processor.row.age",
            description="Seconds for which a row was pending when its handler was called.",
            explicit_bucket_boundaries_advisory=AGES,
        )
        rows = partial(meter.create_counter, unit="{row}")
        self.rows = rows("dcl_processor.rows", description="Rows that have an outcome.")
        text = "Failed rows that are to be tried again."
        self.retries = rows("dcl_processor.row.retries", description=text)
        text = "Rows that another worker had taken over at their settlement."
        self.lost_leases = rows("dcl_processor.row.lost_leases", description=text)


@dataclass(slots=True)
class _Call:
    """The span of one call of a handler, when it began, and whether it is one row's."""

    span: Span
    is_alone: bool
    began_at: int = field(default_factory=time.time_ns)

    def end(self, seconds: float | None = None, error: BaseException | None = None) -> None:
        """End the span, if another row of the call has not."""
        if self.span.is_recording():
            if error is not None:
                _fail(self.span, error)
            # Without the commit, which may be that of many rows.
            self.span.end(None if seconds is None else self.began_at + int(seconds * 1e9))


class Telemetry:
    """The observer of one run, which makes its span for the first row."""

    def __init__(self, instruments: Instruments) -> None:
        self._own = instruments
        self._began_at, self._context = time.time_ns(), contexts.get_current()
        self._span: Span | None = None
        #: Of rows that are at hand; the rows of one call share one.
        self._calls: dict[Any, _Call] = {}
        self._key = contexts.create_key("dcl_processor")

    # --- spans

    def run(self, event: RunEvent) -> None:
        if event.kind == "started":
            return
        for each in self._calls.values():  # of rows that were put back, or interrupted
            each.end(error=event.error)
        if (span := self._span) is None or event.report is None:
            return
        span.set_attribute("dcl_processor.stopped", event.report.stopped)
        for outcome in TRIED:
            span.set_attribute(f"dcl_processor.rows.{outcome}", getattr(event.report, outcome))
        if event.error is not None:
            _fail(span, event.error)
        span.end()

    def row(self, event: RowEvent) -> None:
        if event.kind == "ended":
            self._ended(event)
            return
        if event.since is not None:
            age = (timezone.now() - event.since).total_seconds()
            self._own.age.record(max(age, 0.0), _of(event))
        if (before := self._calls.pop(event.pk, None)) is not None:
            before.end()  # its work was rolled back, and it is handled again
        call: Any = contexts.get_value(self._key)
        if call is None:
            # Set in the context of the call alone, and so of its first row.
            call = _Call(self._begun(event), is_alone=event.together == 1)
            here = trace.set_span_in_context(call.span, contexts.get_current())
            contexts.attach(contexts.set_value(self._key, call, here))
        self._calls[event.pk] = call

    def _begun(self, event: RowEvent) -> Span:
        common = {
            "dcl_processor.worker": worker.number,
            "dcl_processor.delivery": str(event.processor.delivery),
            "dcl_processor.run.id": event.run_id,
            **_of(event),
        }
        if self._span is None:
            self._span = self._own.tracer.start_span(
                f"run {event.processor.name}",
                context=self._context,
                kind=SpanKind.INTERNAL,
                start_time=self._began_at,
                attributes=common,
            )
        own: dict[str, Any] = {
            **common,
            "messaging.operation.name": OPERATION,
            "messaging.operation.type": OPERATION,
        }
        if event.together > 1:
            own["messaging.batch.message_count"] = event.together
        elif self._own.row_ids:
            own["messaging.message.id"] = str(event.pk)
        if event.attempt is not None:
            own["dcl_processor.attempt"] = event.attempt
        return self._own.tracer.start_span(
            f"{OPERATION} {event.processor.name}",
            context=Context(),  # the root of a trace
            kind=SpanKind.CONSUMER,
            attributes=own,
            links=[Link(self._span.get_span_context())],
        )

    def _ended(self, event: RowEvent) -> None:
        self._count(event)
        call = self._calls.pop(event.pk, None)
        if call is not None:
            if call.is_alone:
                call.span.set_attribute("dcl_processor.outcome", event.outcome or "")
            call.end(event.duration, event.error if event.outcome == "failed" else None)

    # --- metrics

    def _count(self, event: RowEvent) -> None:
        own, common = self._own, _of(event)
        if event.outcome in TRIED:
            own.rows.add(1, {**common, "dcl_processor.outcome": event.outcome})
        else:
            own.lost_leases.add(1, common)
        if event.is_retried:
            own.retries.add(1, common)
        if event.duration is not None:
            attributes = {**common, "messaging.operation.name": OPERATION}
            if event.outcome == "failed" and event.error is not None:
                attributes["error.type"] = type(event.error).__qualname__
            own.duration.record(event.duration, attributes)


def _of(event: RowEvent) -> dict[str, Any]:
    return {"messaging.system": SYSTEM, "messaging.destination.name": event.processor.name}


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, shown(describe(error), LONGEST)))
