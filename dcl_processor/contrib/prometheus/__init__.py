"""Metrics for Prometheus; the extra ``prometheus`` has its client.

Three sources, for three kinds of processes:

- ``processors run`` counts for itself and for the workers that it starts: ``--metrics-port``.
- In a program that calls ``run()`` itself, such as a Celery worker or a web server, ``register()``
  adds the metrics to the program's registry; in the client's multi-process mode, too.
- The numbers that only the database knows: ``gauges_view()``.

The names and labels are in the documentation, and in the dashboard and the alert rules of the
folder ``monitoring``; a test compares them. A label never has a primary key, a host or a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dcl_processor import observers
from dcl_processor.insights import status as insights
from dcl_processor.insights.answer import Answer, How
from dcl_processor.observers import Observer
from dcl_processor.operator.registry import processors
from dcl_processor.pending import steady as time
from dcl_processor.processor import BatchProcessor

from .exposition import ProcessMetrics

__all__ = ["gauges_view", "register"]

#: The observer that ``register()`` has added in this process.
_registered: Observer | None = None


def register(registry: CollectorRegistry | None = None) -> None:
    """Add the metrics of the runs in this process to a registry; a further call does nothing.

    ``registry``: the client's global one by default. In the client's multi-process mode, so if the
    variable ``PROMETHEUS_MULTIPROC_DIR`` is set, the metrics are written to its files.
    """
    global _registered  # noqa: PLW0603  # one per process, as the client's registry is
    if _registered is not None:
        return
    _registered = ProcessMetrics(REGISTRY if registry is None else registry)
    observers.add(_registered)


# --- the metrics that only the database knows: what waits, since when, and what is stuck


#: Seconds for which what was read from the database is served again.
FRESH_FOR = 15.0

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
    "lost": ("dcl_processor_lost_runs", "Recorded runs without a heartbeat and without an end."),
}
UNKNOWN = "dcl_processor_unknown_gauges"
UNKNOWN_HELP = "Gauges that are absent because the database did not answer in time."


class Gauges(Collector):
    """Exposes what the database knows; reads it again when it is older than ``FRESH_FOR``.

    A gauge whose question was not answered is absent, because 0 would be taken for the answer.
    """

    def __init__(self, processors: Callable[[], Iterable[BatchProcessor[Any]]]) -> None:
        self._processors = processors
        self._lock = threading.Lock()
        self._read_at = -FRESH_FOR
        self._metrics: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; scrapes that come at once wait for one reading."""
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_FOR:
                self._metrics = list(gauges(_read(self._processors())))
                # From the end of the reading, which may take long itself.
                self._read_at = time.monotonic()
            return list(self._metrics)


def _read(processors: Iterable[BatchProcessor[Any]]) -> list[insights.Status]:
    down: dict[str, str] = {}
    return [insights.status(each, only=[*GAUGES], down=down) for each in processors]


def gauges(found: Iterable[insights.Status]) -> Iterator[Metric]:
    """Yield the metrics of the answers."""
    metrics = {
        answer: GaugeMetricFamily(name, text, labels=["processor"])
        for answer, (name, text) in GAUGES.items()
    }
    unknown = GaugeMetricFamily(UNKNOWN, UNKNOWN_HELP, labels=["processor"])
    for status in found:
        unknown.add_metric([status.name], sum(map(_is_unknown, status.answers.values())))
        for answer, metric in metrics.items():
            value = _value(status.answers[answer])
            if value is not None:
                metric.add_metric([status.name], value)
    yield from (*metrics.values(), unknown)


def _is_unknown(answer: Answer[Any]) -> bool:
    return answer.how is How.UNKNOWN


def _value(answer: Answer[Any]) -> float | None:
    if _is_unknown(answer) or answer.how is How.NOT_RECORDED:
        return None
    # A time of no row is 0, and so is one to come.
    return max(0.0, answer.least)


_gauges = CollectorRegistry()
_gauges.register(Gauges(lambda: processors().values()))


@transaction.non_atomic_requests
def gauges_view(request: HttpRequest) -> HttpResponse:
    """Answer a scrape with what the database knows of all processors, at most 15 seconds old.

    Each process of a web server reads for itself. The view checks no permission: add it to the URLs
    behind what keeps others away from them.
    """
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(_gauges), content_type=content_type)
