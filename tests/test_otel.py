"""Spans for OpenTelemetry, as its SDK exports them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dcl_processor import Discard, Retry, Snooze
from dcl_processor.contrib import otel
from tests.contract.support import errands as the
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Exported:
    spans: InMemorySpanExporter
    tracers: TracerProvider

    def named(self, name: str) -> list[ReadableSpan]:
        return [each for each in self.spans.get_finished_spans() if each.name == name]


@pytest.fixture
def exported() -> Iterator[Exported]:
    spans, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    otel.instrument(tracer_provider=tracers)
    yield Exported(spans, tracers)
    otel.uninstrument()
    tracers.shutdown()


def test_each_row_is_a_trace_that_links_to_its_run(exported: Exported) -> None:
    rows = the.errands(2)
    tracer = exported.tracers.get_tracer("theirs")

    def handle(_: Errand) -> None:
        with tracer.start_as_current_span("their call"):
            pass

    with tracer.start_as_current_span("their task"):
        the.transactional(handle, name="shop.row").run()
    [run] = exported.named("run shop.row")
    spans = exported.named("process shop.row")
    assert [span.parent for span in spans] == [None, None]
    assert len({span.context.trace_id for span in [run, *spans]}) == 3
    assert [span.kind for span in spans] == [SpanKind.CONSUMER] * 2
    assert [[link.context for link in span.links] for span in spans] == [[run.context]] * 2
    theirs = exported.named("their call")
    assert [span.parent for span in theirs] == [span.context for span in spans]
    run_id = (run.attributes or {})["dcl_processor.run.id"]
    assert [dict(span.attributes or {}) for span in spans] == [
        {
            "messaging.system": "dcl_processor",
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": "shop.row",
            "messaging.message.id": str(row.pk),
            "dcl_processor.worker": 0,
            "dcl_processor.delivery": "transactional",
            "dcl_processor.run.id": run_id,
            "dcl_processor.outcome": "processed",
        }
        for row in rows
    ]
    assert (run.attributes or {})["dcl_processor.rows.processed"] == 2
    assert trace.get_current_span().get_span_context().is_valid is False


def test_an_empty_run_has_no_span(exported: Exported) -> None:
    the.transactional(the.ignore).run()
    assert exported.spans.get_finished_spans() == ()


def test_a_failure_is_the_status_of_its_span(exported: Exported) -> None:
    the.errands(4)

    def handle(row: Errand) -> None:
        match row.place:
            case 0:
                raise OSError("no route\nto postgres://shop:geheim@db/" + "x" * 300)
            case 1:
                raise Snooze(delay=60)
            case 2:
                raise Discard("never")

    retry = Retry(3, backoff=60, jitter=0)
    the.at_least_once(handle, name="shop.fail", retry=retry, failed={"dead": True}).run()
    failed, snoozed, discarded, processed = exported.named("process shop.fail")
    assert failed.status.status_code is StatusCode.ERROR
    text = failed.status.description or ""
    assert text.startswith("no route to postgres://shop:***@db/xxx")
    assert len(text) == otel.LONGEST
    assert (failed.attributes or {})["error.type"] == "OSError"
    assert (failed.attributes or {})["dcl_processor.attempt"] == 1
    assert failed.events == ()  # exceptions are log records
    others = [snoozed, discarded, processed]
    assert {each.status.status_code for each in others} == {StatusCode.UNSET}
    assert [(each.attributes or {})["dcl_processor.outcome"] for each in others] == [
        "snoozed",
        "discarded",
        "processed",
    ]
    [run] = exported.named("run shop.fail")
    assert run.status.status_code is StatusCode.UNSET


def test_a_batch_is_one_span(exported: Exported) -> None:
    the.errands(3)
    together: dict[str, Any] = {"process_batch": the.ignore, "batch_size": 3}
    the.transactional(the.ignore, name="shop.together", **together).run()
    [span] = exported.named("process shop.together")
    attributes = span.attributes or {}
    assert attributes["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes


def test_the_error_of_a_run_is_that_of_its_span(exported: Exported) -> None:
    the.errands(2)

    def interrupt(_: Errand) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        the.transactional(interrupt, name="shop.stop").run()
    [run] = exported.named("run shop.stop")
    assert run.status.status_code is StatusCode.ERROR
    assert (run.attributes or {})["error.type"] == "KeyboardInterrupt"
    [row] = exported.named("process shop.stop")
    assert row.status.status_code is StatusCode.ERROR
