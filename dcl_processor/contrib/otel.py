"""Traces for OpenTelemetry; the extra ``otel`` has its API, the project the SDK.

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
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from dcl_processor import __version__
from dcl_processor.options import worker
from dcl_processor.report.errors import describe, shown
from dcl_processor.report.observer import RowEvent, RunEvent, observers_installed
from dcl_processor.report.report import TRIED

SYSTEM, OPERATION = "dcl_processor", "process"
LONGEST = 200  # characters of an error's text that a span has

_tracer: Any = None


def instrument(*, tracer_provider: TracerProvider | None = None) -> None:
    """Make spans of the runs in this process; a further call does nothing.

    ``tracer_provider``: that of the project by default.
    """
    global _tracer  # noqa: PLW0603  # one per process, as the provider is
    if _tracer is None:
        _tracer = trace.get_tracer(SYSTEM, __version__, tracer_provider)
        observers_installed.append(_spans)


def uninstrument() -> None:
    """Make no spans of runs that begin from now on in this process."""
    global _tracer  # noqa: PLW0603  # as above
    if _tracer is not None:
        observers_installed.remove(_spans)
        _tracer = None


def _spans(_: Any) -> Spans:
    return Spans(_tracer)


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


class Spans:
    """The observer of one run, which makes its span for the first row."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._began_at, self._context = time.time_ns(), contexts.get_current()
        self._span: Span | None = None
        #: The attributes of each span of the run.
        self._common: dict[str, Any] = {}
        #: Of rows that are at hand; the rows of one call share one.
        self._calls: dict[Any, _Call] = {}
        self._key = contexts.create_key("dcl_processor")

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
        if self._span is None:
            self._span = self._run_span(event)
        own: dict[str, Any] = {
            **self._common,
            "messaging.operation.name": OPERATION,
            "messaging.operation.type": OPERATION,
        }
        if event.together > 1:
            own["messaging.batch.message_count"] = event.together
        else:
            own["messaging.message.id"] = str(event.pk)
        if event.attempt is not None:
            own["dcl_processor.attempt"] = event.attempt
        return self._tracer.start_span(
            f"{OPERATION} {event.processor.name}",
            context=Context(),  # the root of a trace
            kind=SpanKind.CONSUMER,
            attributes=own,
            links=[Link(self._span.get_span_context())],
        )

    def _run_span(self, event: RowEvent) -> Span:
        self._common = {
            "messaging.system": SYSTEM,
            "messaging.destination.name": event.processor.name,
            "dcl_processor.worker": worker.number,
            "dcl_processor.delivery": str(event.processor.delivery),
            "dcl_processor.run.id": event.run_id,
        }
        return self._tracer.start_span(
            f"run {event.processor.name}",
            context=self._context,
            kind=SpanKind.INTERNAL,
            start_time=self._began_at,
            attributes=self._common,
        )

    def _ended(self, event: RowEvent) -> None:
        call = self._calls.pop(event.pk, None)
        if call is not None:
            if call.is_alone:
                call.span.set_attribute("dcl_processor.outcome", event.outcome or "")
            call.end(event.duration, event.error if event.outcome == "failed" else None)


def _fail(span: Span, error: BaseException) -> None:
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(Status(StatusCode.ERROR, shown(describe(error), LONGEST)))
