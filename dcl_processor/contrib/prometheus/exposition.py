"""The metrics of runs, by their names; counters' samples have ``_total`` behind the name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dcl_processor.log_fields import Running
from dcl_processor.metrics import AGES, DURATIONS, LAST_SUCCESS, ROWS, Samples, added, succeeded
from dcl_processor.observers import Handling, Observer
from dcl_processor.report.report import TRIED, Report

RETRIES, LOST_LEASES = "dcl_processor_retries", "dcl_processor_lost_leases"
HANDLER = "dcl_processor_handler_duration_seconds"
LOCK = "dcl_processor_lock_held_seconds"
AGE = "dcl_processor_age_at_claim_seconds"

#: The type of each metric, and what it means.
METRICS = {
    ROWS: ("counter", "Rows that have an outcome, by outcome."),
    RETRIES: ("counter", "Failed rows that are to be tried again."),
    LOST_LEASES: ("counter", "Rows that another worker had taken over at their settlement."),
    HANDLER: ("histogram", "Seconds that each call of a handler took."),
    LOCK: ("histogram", "Seconds for which a transaction held the locks of its rows."),
    AGE: ("histogram", "Seconds for which a row was pending at its claim."),
    LAST_SUCCESS: ("gauge", "When a run last ended in which no row failed for good."),
}


class ProcessMetrics(Observer):
    """Writes to the client's own metrics, which alone work in its multi-process mode, too.

    ``names``: processors that have samples before anything happens.
    """

    def __init__(self, registry: CollectorRegistry, names: Iterable[str] = ()) -> None:
        one: Any = {"labelnames": ["processor"], "registry": registry}
        two: Any = {**one, "labelnames": ["processor", "outcome"]}
        texts = {name: text for name, (_, text) in METRICS.items()}
        self._rows = Counter(ROWS, texts[ROWS], **two)
        self._retries = Counter(RETRIES, texts[RETRIES], **one)
        self._lost = Counter(LOST_LEASES, texts[LOST_LEASES], **one)
        self._handler = Histogram(HANDLER, texts[HANDLER], buckets=DURATIONS, **one)
        self._lock = Histogram(LOCK, texts[LOCK], buckets=DURATIONS, **one)
        self._age = Histogram(AGE, texts[AGE], buckets=AGES, **one)
        # Of all processes, the dead ones included: it is not a state of theirs.
        self._success = Gauge(LAST_SUCCESS, texts[LAST_SUCCESS], multiprocess_mode="max", **one)
        for name in names:
            self._begin(name)

    def _begin(self, name: str) -> None:
        """Expose 0 from the beginning, because the first increase of a new series is not seen."""
        for outcome in TRIED:
            self._rows.labels(name, outcome)
        for each in (self._retries, self._lost, self._handler, self._lock, self._age):
            each.labels(name)

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        for each in ages:
            self._age.labels(name).observe(each)

    def unlocked(self, name: str, seconds: float) -> None:
        self._lock.labels(name).observe(seconds)

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:  # noqa: ARG002  # as in Observer
        if handling.call.duration is not None:
            self._handler.labels(handling.call.label).observe(handling.call.duration)

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        if outcome in TRIED:
            self._rows.labels(name, outcome).inc()
        else:
            self._lost.labels(name).inc()
        if is_retried:
            self._retries.labels(name).inc()

    def run_started(self, running: Running) -> None:
        self._begin(running.name)

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        if error is None and succeeded(report):
            self._success.labels(running.name).set_to_current_time()


class Counts(ProcessMetrics):
    """What was counted in this process, and in those that it has started."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        registry = CollectorRegistry()
        super().__init__(registry, names)
        self._collect = registry.collect
        self._adding = threading.Lock()
        self._others: Samples = {}

    def add(self, samples: Samples) -> None:
        """Add what another process has counted."""
        with self._adding:
            self._others = added(self._others, samples)

    def samples(self) -> Samples:
        """Return what was counted so far."""
        return added(_samples(self._collect()), self._others)


def _samples(metrics: Iterable[Metric]) -> Samples:
    # Not when a series has begun, which is a time, and of no use for a command.
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in metrics
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def families(samples: Samples) -> Iterator[Metric]:
    """Yield the metrics of samples."""
    for name, (kind, text) in METRICS.items():
        metric = Metric(name, text, kind)
        for (sample, labels), value in samples.items():
            if sample.startswith(name):
                metric.add_sample(sample, dict(labels), value)
        yield metric


class _Source(Collector):
    """Has metrics, as a registry has them."""

    def __init__(self, read: Callable[[], Samples]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return families(self._read())


def serve(read: Callable[[], Samples], address: str, port: int) -> Callable[[], None]:
    """Serve the metrics over HTTP, from a thread; return what ends that.

    Raises ``OSError`` if the port cannot be had.
    """
    own = CollectorRegistry()
    own.register(_Source(read))
    server, thread = start_http_server(port, addr=address, registry=own)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
