"""Traces and metrics for OpenTelemetry; the extra ``otel`` has its API, the project the SDK.

Spans are made where the handler runs, so that the spans of its SQL and HTTP calls are their
children. Each worker is a process of its own, and exports for itself: call ``instrument()``
in the ``ready()`` of an app, which is called in each of them.

Names follow the conventions for messaging, version 1.44, which are still in development; what these
do not have begins with ``dcl_processor.``. A row's span is the root of a trace, and links to the
span of its run, because a run of a million rows is not one trace. A run without a row has none.

A failure is the status of its span, and no event of it: such events are deprecated. The log record
of the failure has the traceback, and the same ``run_id`` and ``pk``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from dcl_processor import __version__, observers, worker
from dcl_processor.log_fields import Running
from dcl_processor.metrics import AGES, DURATIONS
from dcl_processor.observers import Handling, Observer
from dcl_processor.report.errors import describe, shown
from dcl_processor.report.outcomes import Discard, Snooze
from dcl_processor.report.report import TRIED, Report

SYSTEM, OPERATION = "dcl_processor", "process"

#: Characters of an error's text that a span has.
LONGEST = 200

logger = logging.getLogger("dcl_processor.operations")

#: Milliseconds that the exporters have to send what they keep, when a worker ends.
FLUSH_WITHIN = 5_000

_instrumented: Telemetry | None = None


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
        _instrumented = Telemetry(tracer_provider, meter_provider, row_ids=row_ids)
        observers.add(_instrumented)


def uninstrument() -> None:
    """Make no more spans and metrics in this process."""
    global _instrumented  # noqa: PLW0603  # as above
    if _instrumented is not None:
        observers.remove(_instrumented)
        _instrumented = None


@dataclass(slots=True)
class _Run:
    """A run, and the context in which it began; once it has a row, its span, and the link to it."""

    running: Running
    context: Context
    attributes: dict[str, Any]  # also those of its rows
    span: Span | None = None
    links: list[Link] = field(default_factory=list)


class Telemetry(Observer):
    """Makes spans, and records metrics, with the providers of the project."""

    def __init__(
        self,
        tracer_provider: TracerProvider | None,
        meter_provider: MeterProvider | None,
        *,
        row_ids: bool,
    ) -> None:
        self._providers = (tracer_provider, meter_provider)
        self._row_ids = row_ids
        own = SYSTEM, __version__
        self._tracer = trace.get_tracer(*own, tracer_provider)
        meter = metrics.get_meter(*own, meter_provider)
        seconds = partial(meter.create_histogram, unit="s")
        self._duration = seconds(
            "messaging.process.duration",
            description="Seconds that each call of a handler took.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self._lock_duration = seconds(
            "dcl_processor.row.lock.duration",
            description="Seconds for which a transaction held the locks of its rows.",
            explicit_bucket_boundaries_advisory=DURATIONS,
        )
        self._age = seconds(
            "dcl_processor.row.age",
            description="Seconds for which a row was pending at its claim.",
            explicit_bucket_boundaries_advisory=AGES,
        )
        rows = partial(meter.create_counter, unit="{row}")
        self._rows = rows("dcl_processor.rows", description="Rows that have an outcome.")
        self._retries = rows(
            "dcl_processor.row.retries", description="Failed rows that are to be tried again."
        )
        self._lost_leases = rows(
            "dcl_processor.row.lost_leases",
            description="Rows that another worker had taken over at their settlement.",
        )
        self._lock = threading.Lock()
        #: By their ids.
        self._runs: dict[str, _Run] = {}

    # --- spans

    def run_started(self, running: Running) -> None:
        self._runs[running.id] = _Run(running, contexts.get_current(), _attributes(running))

    def handler_started(self, handling: Handling) -> None:
        running, call = handling.running, handling.call
        # None: in no run, or this observer was added in the middle of it.
        run = None if running is None else self._runs.get(running.id)
        attributes: dict[str, Any] = {
            **_of(call.label),
            "messaging.operation.name": OPERATION,
            "messaging.operation.type": OPERATION,
            **(_attributes(running) if run is None else run.attributes),
        }
        if len(call.keys) != 1:
            attributes["messaging.batch.message_count"] = len(call.keys)
        elif self._row_ids:
            attributes["messaging.message.id"] = str(call.keys[0])
        if call.attempt is not None:
            attributes["dcl_processor.attempt"] = call.attempt
        span = self._tracer.start_span(
            f"{OPERATION} {call.label}",
            context=Context(),  # the root of a trace
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=() if run is None else run.links or self._links(run),
        )
        before = contexts.get_current()
        handling.notes[self] = span, contexts.attach(trace.set_span_in_context(span, before))

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:
        call, outcome = handling.call, "processed" if error is None else _outcome(error)
        made = handling.notes.pop(self, None)
        if made is not None:
            span, token = made
            contexts.detach(token)
            if len(call.keys) == 1 or error is not None:
                span.set_attribute("dcl_processor.outcome", outcome)
            if error is not None and outcome == "failed":
                _fail(span, error)
            span.end()
        if call.duration is not None:
            attributes = {**_of(call.label), "messaging.operation.name": OPERATION}
            if error is not None and outcome == "failed":
                attributes["error.type"] = type(error).__qualname__
            self._duration.record(call.duration, attributes)

    def _links(self, run: _Run) -> list[Link]:
        """Return the link to the span of a run, which is made for its first row."""
        with self._lock:
            if run.span is None:
                run.span = self._tracer.start_span(
                    f"run {run.running.name}",
                    context=run.context,
                    kind=SpanKind.INTERNAL,
                    start_time=run.running.began_at,
                    attributes={**_of(run.running.name), **run.attributes},
                )
            run.links = [Link(run.span.get_span_context())]
        return run.links

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        if (run := self._runs.pop(running.id, None)) is None:
            return
        # Ctrl-C may come before the span of a row has ended, which would stay the current one.
        contexts.attach(run.context)
        if (span := run.span) is None:
            return
        span.set_attribute("dcl_processor.stopped", report.stopped)
        for outcome in TRIED:
            span.set_attribute(f"dcl_processor.rows.{outcome}", getattr(report, outcome))
        if error is not None:
            _fail(span, error)
        span.end()

    # --- metrics

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        attributes = _of(name)
        for each in ages:
            self._age.record(each, attributes)

    def unlocked(self, name: str, seconds: float) -> None:
        self._lock_duration.record(seconds, _of(name))

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        attributes = _of(name)
        if outcome in TRIED:
            self._rows.add(1, {**attributes, "dcl_processor.outcome": outcome})
        else:
            self._lost_leases.add(1, attributes)
        if is_retried:
            self._retries.add(1, attributes)

    def flush(self) -> None:
        tracers, meters = self._providers
        providers: list[Any] = [
            tracers or trace.get_tracer_provider(),
            meters or metrics.get_meter_provider(),
        ]

        def send() -> None:
            for each in providers:
                if hasattr(each, "force_flush"):  # those of the SDK, and not of the API
                    each.force_flush(FLUSH_WITHIN)

        # In a thread, which no process waits for: a ``BatchSpanProcessor`` ignores the time limit,
        # and an exporter tries again for a minute while its collector is away.
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(FLUSH_WITHIN / 1_000)
        if thread.is_alive():
            logger.warning(
                "OpenTelemetry did not send what it keeps within %g s, and the rest may be lost",
                FLUSH_WITHIN / 1_000,
            )


@lru_cache
def _of(name: str) -> dict[str, str]:
    return {"messaging.system": SYSTEM, "messaging.destination.name": name}


def _attributes(running: Running | None) -> dict[str, Any]:
    """Return what the spans of a run and of its rows have in common."""
    own = {"dcl_processor.worker": worker.number}
    if running is None:
        return own
    return {**own, "dcl_processor.delivery": running.delivery, "dcl_processor.run.id": running.id}


def _outcome(error: BaseException) -> str:
    """Return the outcome that the handler has given its row; its settlement may still fail."""
    match error:
        case Snooze():
            return "snoozed"
        case Discard():
            return "discarded"
    return "failed"


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, shown(describe(error), LONGEST)))
