"""Metrics for Prometheus, by its client, which the extra ``prometheus`` installs.

``register()`` counts what the runs in this process do; ``gauges_view()`` answers with what only the
database knows. A label never has a primary key, a host or a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dcl_processor.insights.status import Status, status
from dcl_processor.operator.registry import processors
from dcl_processor.report.observer import RowEvent, RunEvent, observers_installed
from dcl_processor.report.report import TRIED, Report

__all__ = ["gauges_view", "register"]

#: Upper bounds of durations, in seconds. The client's end at 10 s; handlers take minutes.
DURATIONS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

#: Upper bounds of the age of a row, in seconds: a second to a week.
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 604_800.0)


def register(registry: CollectorRegistry | None = None) -> None:
    """Add the metrics of the runs in this process to a registry; the client refuses a second call.

    ``registry``: the client's global one by default. In the client's multi-process mode, so if the
    variable ``PROMETHEUS_MULTIPROC_DIR`` is set, the metrics are written to its files.
    """
    counts = Counts(registry or REGISTRY)
    observers_installed.append(lambda _: counts)


class Counts:
    """The observer that counts, with the client's own metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        one: Any = {"labelnames": ["processor"], "registry": registry}
        two: Any = {**one, "labelnames": ["processor", "outcome"]}
        name = "dcl_processor_{}".format
        self._rows = Counter(name("rows"), "Rows that have an outcome, by outcome.", **two)
        self._retries = Counter(name("retries"), "Failed rows that are to be tried again.", **one)
        text = "Rows that another worker had taken over at their settlement."
        self._lost = Counter(name("lost_leases"), text, **one)
        text = "Seconds that the call of a row's handler took."
        self._handler = Histogram(name("handler_duration_seconds"), text, buckets=DURATIONS, **one)
        text = "Seconds for which a row was pending when its handler was called."
        self._age = Histogram(name("age_at_start_seconds"), text, buckets=AGES, **one)
        text = "When a run last ended in which no row failed for good."
        # Of all processes, the dead ones included: it is not a state of theirs.
        self._success = Gauge(
            name("last_success_timestamp_seconds"), text, multiprocess_mode="max", **one
        )

    def run(self, event: RunEvent) -> None:
        name = event.processor.name
        if event.kind == "started":
            # 0 from the beginning, because the first increase of a new series is not seen.
            for outcome in TRIED:
                self._rows.labels(name, outcome)
            for each in (self._retries, self._lost, self._handler, self._age):
                each.labels(name)
        elif event.error is None and event.report is not None and succeeded(event.report):
            self._success.labels(name).set_to_current_time()

    def row(self, event: RowEvent) -> None:
        name = event.processor.name
        if event.kind == "started":
            if event.since is not None:
                age = (timezone.now() - event.since).total_seconds()
                self._age.labels(name).observe(max(age, 0.0))
            return
        if event.outcome in TRIED:
            self._rows.labels(name, event.outcome).inc()
        else:
            self._lost.labels(name).inc()
        if event.is_retried:
            self._retries.labels(name).inc()
        if event.duration is not None:
            self._handler.labels(name).observe(event.duration)


def succeeded(report: Report) -> bool:
    """Return whether a run succeeded: it could start rows, and no row failed for good."""
    # Any other end is too many failures, or a gate's.
    is_free = report.stopped in {"drained", "limit", "timeout", "signal"}
    return is_free and report.error is None and report.failed == report.to_retry


# --- the metrics that only the database knows: what waits, since when, and what is stuck


#: The answers about the database that are exposed: the name of the gauge, and what it means.
GAUGES = {
    "pending": ("dcl_processor_pending_rows", "Pending rows; 10001 means more than 10000."),
    "oldest": (
        "dcl_processor_oldest_pending_age_seconds",
        "Seconds for which the oldest pending row has been pending; 0 if none is.",
    ),
    "in_doubt": ("dcl_processor_in_doubt_rows", "Rows whose claim is old and was never settled."),
    "given_up": ("dcl_processor_given_up_rows", "Rows that failed for good, or were discarded."),
    "paused": ("dcl_processor_paused_seconds", "Seconds of the pause; 0 without one."),
}
UNKNOWN = "dcl_processor_unknown_gauges"


class Gauges(Collector):
    """Reads what the database knows of all processors, when it is scraped.

    A gauge whose question was not answered is absent, because 0 would be taken for the answer.
    """

    def collect(self) -> Iterable[Metric]:
        down: dict[str, str] = {}
        found = [status(each, only=[*GAUGES], down=down) for each in processors().values()]
        return gauges(found)


def gauges(found: Iterable[Status]) -> Iterator[Metric]:
    """Yield the metrics of the answers."""
    metrics = {
        answer: GaugeMetricFamily(name, text, labels=["processor"])
        for answer, (name, text) in GAUGES.items()
    }
    text = "Gauges that are absent because the database did not answer in time."
    unknown = GaugeMetricFamily(UNKNOWN, text, labels=["processor"])
    for each in found:
        answers = each.answers
        missing = [name for name in GAUGES if answers[name].how == "unknown"]
        unknown.add_metric([each.name], len(missing))
        for name in GAUGES:
            if not answers[name].missing:
                # A time to come is 0, as that of no row.
                metrics[name].add_metric([each.name], max(0.0, answers[name].least))
    yield from (*metrics.values(), unknown)


@transaction.non_atomic_requests
def gauges_view(request: HttpRequest) -> HttpResponse:  # noqa: ARG001  # a view's
    """Answer a scrape with what the database knows of all processors.

    The view checks no permission. Each scrape asks the database: ``cache_page(15)`` around the view
    bounds that.
    """
    registry = CollectorRegistry()
    registry.register(Gauges())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
