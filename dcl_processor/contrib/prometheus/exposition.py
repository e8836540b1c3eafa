"""The metrics of tallies, by their names; counters' samples have ``_total`` behind the name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from dcl_processor.log_fields import Running
from dcl_processor.metrics.collector import (
    AGES,
    DURATIONS,
    OUTCOMES,
    Distribution,
    Tally,
    succeeded,
)
from dcl_processor.observers import Handling, Observer
from dcl_processor.report import Report

ROWS, RETRIES = "dcl_processor_rows", "dcl_processor_retries"
LOST_LEASES = "dcl_processor_lost_leases"
HANDLER = "dcl_processor_handler_duration_seconds"
LOCK = "dcl_processor_lock_held_seconds"
AGE = "dcl_processor_age_at_claim_seconds"
LAST_SUCCESS = "dcl_processor_last_success_timestamp_seconds"

#: What each metric means, by its name.
HELP = {
    ROWS: "Rows that have an outcome, by outcome.",
    RETRIES: "Failed rows that are to be tried again.",
    LOST_LEASES: "Rows that another worker had taken over at their settlement.",
    HANDLER: "Seconds that each call of a handler took.",
    LOCK: "Seconds for which a transaction held the locks of its rows.",
    AGE: "Seconds for which a row was pending at its claim.",
    LAST_SUCCESS: "When a run last ended in which no row failed for good.",
}


def families(tallies: Mapping[str, Tally]) -> Iterator[Metric]:
    """Yield the metrics of tallies, by the processors' names."""
    rows = CounterMetricFamily(ROWS, HELP[ROWS], labels=["processor", "outcome"])
    retries = CounterMetricFamily(RETRIES, HELP[RETRIES], labels=["processor"])
    lost = CounterMetricFamily(LOST_LEASES, HELP[LOST_LEASES], labels=["processor"])
    success = GaugeMetricFamily(LAST_SUCCESS, HELP[LAST_SUCCESS], labels=["processor"])
    histograms = {
        name: HistogramMetricFamily(name, HELP[name], labels=["processor"])
        for name in (HANDLER, LOCK, AGE)
    }
    for name, tally in tallies.items():
        for outcome in OUTCOMES:
            rows.add_metric([name, outcome], tally.rows[outcome])
        retries.add_metric([name], tally.retries)
        lost.add_metric([name], tally.lost_leases)
        if tally.last_success is not None:
            success.add_metric([name], tally.last_success)
        for key, each in ((HANDLER, tally.handler), (LOCK, tally.lock), (AGE, tally.age)):
            histograms[key].add_metric([name], _buckets(each), each.total)
    yield from (rows, retries, lost, *histograms.values(), success)


def _buckets(values: Distribution) -> list[tuple[str, float]]:
    bounds = [*map(str, values.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(values.counts)), strict=True))


class Tallies(Collector):
    """Exposes what a collector has counted."""

    def __init__(self, read: Callable[[], Mapping[str, Tally]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        return families(self._read())

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that a registry refuses a second collector."""
        return families({})


def serve(
    tallies: Callable[[], Mapping[str, Tally]], address: str, port: int
) -> Callable[[], None]:
    """Serve the metrics over HTTP, from a thread; return what ends that.

    Raises ``OSError`` if the port cannot be had.
    """
    own = CollectorRegistry()
    own.register(Tallies(tallies))
    server, thread = start_http_server(port, addr=address, registry=own)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


# --- the metrics of runs in this process, written to the client's own objects
#
# Only these work in the client's multi-process mode.


class ProcessMetrics(Observer):
    """Writes to the client's own metrics, which alone work in its multi-process mode."""

    def __init__(self, registry: CollectorRegistry) -> None:
        one = ["processor"]
        self._rows = Counter(ROWS, HELP[ROWS], [*one, "outcome"], registry=registry)
        self._retries = Counter(RETRIES, HELP[RETRIES], one, registry=registry)
        self._lost = Counter(LOST_LEASES, HELP[LOST_LEASES], one, registry=registry)
        self._handler = self._histogram(HANDLER, DURATIONS, registry)
        self._lock = self._histogram(LOCK, DURATIONS, registry)
        self._age = self._histogram(AGE, AGES, registry)
        # Of all processes, the dead ones included: it is not a state of theirs.
        self._success = Gauge(
            LAST_SUCCESS, HELP[LAST_SUCCESS], one, registry=registry, multiprocess_mode="max"
        )

    @staticmethod
    def _histogram(name: str, bounds: Sequence[float], registry: CollectorRegistry) -> Histogram:
        return Histogram(name, HELP[name], ["processor"], registry=registry, buckets=bounds)

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        for each in ages:
            self._age.labels(name).observe(each)

    def unlocked(self, name: str, seconds: float) -> None:
        self._lock.labels(name).observe(seconds)

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:  # noqa: ARG002  # as in Observer
        if handling.call.duration is not None:
            self._handler.labels(handling.call.label).observe(handling.call.duration)

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        if outcome in OUTCOMES:
            self._rows.labels(name, outcome).inc()
        else:
            self._lost.labels(name).inc()
        if is_retried:
            self._retries.labels(name).inc()

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        if error is None and succeeded(report):
            self._success.labels(running.name).set_to_current_time()
