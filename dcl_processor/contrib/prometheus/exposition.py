"""The metrics of tallies, by their names; counters' samples have ``_total`` behind the name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
    write_to_textfile,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dcl_processor import steady as time
from dcl_processor.log_fields import Running
from dcl_processor.metrics import AGES, DURATIONS, OUTCOMES, Distribution, Tally, succeeded
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


class _Source(Collector):
    """Has metrics, as a registry has them."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def serve(
    tallies: Callable[[], Mapping[str, Tally]], address: str, port: int
) -> Callable[[], None]:
    """Serve the metrics over HTTP, from a thread; return what ends that.

    Raises ``OSError`` if the port cannot be had.
    """
    own = CollectorRegistry()
    own.register(_Source(lambda: families(tallies())))
    server, thread = start_http_server(port, addr=address, registry=own)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class ProcessMetrics(Observer):
    """Writes to the client's own metrics, which alone work in its multi-process mode, too."""

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

    def run_started(self, running: Running) -> None:
        # With 0 from the beginning, because the first increase of a new series is not seen.
        for outcome in OUTCOMES:
            self._rows.labels(running.name, outcome)
        self._retries.labels(running.name)
        self._lost.labels(running.name)

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        if error is None and succeeded(report):
            self._success.labels(running.name).set_to_current_time()


# --- a file for node_exporter's textfile collector, to which commands add what they have counted
#
# A command that cron starts counts from 0. Were its counts written as they are, Prometheus would
# take each run for a restart, and a run that failed would remove the time of the last success. So
# the file is read before it is written, under a lock, because two commands may write to it.


# Windows has no fcntl: there two commands must not write to one file.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None


#: Seconds to wait for the lock, and between two looks at it.
LOCKED_WITHIN, PAUSE = 5.0, 0.02


class TextFile:
    """The file at a path; the file beside it, with ``.lock`` behind its name, is its lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, tallies: Mapping[str, Tally]) -> None:
        """Add tallies to those in the file; readers see the old file, or the new one.

        Raises ``OSError`` if the file cannot be written, and ``TimeoutError`` if another process
        keeps its lock. A file with other contents is replaced.
        """
        with self._locked():
            write(self._path, added(families(tallies), self._read()))

    def _read(self) -> Mapping[str, Metric]:
        try:
            text = self._path.read_text(encoding="utf-8")
            return {each.name: each for each in text_string_to_metric_families(text)}
        except (FileNotFoundError, ValueError):
            return {}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._path.with_name(f"{self._path.name}.lock")
        until = time.monotonic() + LOCKED_WITHIN
        with lock.open("a") as file:
            # Never waits in the kernel, where it could wait without limit: the process that has the
            # lock may be stopped.
            while fcntl is not None:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= until:
                    raise TimeoutError(f"another process has kept {lock} for {LOCKED_WITHIN:g} s")
                time.sleep(PAUSE)
            yield


def added(metrics: Iterable[Metric], before: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield the metrics with those of before added to them: sums, and the later one of two times.

    Buckets of other bounds, those of another version, are left out.
    """
    for metric in metrics:
        own = [*metric.samples]
        bounds = {each.labels.get("le") for each in own}
        old = before[metric.name].samples if metric.name in before else []
        if own and not {each.labels.get("le") for each in old} <= bounds:
            old = []
        found: dict[Any, Any] = {}
        for sample in [*old, *own]:
            key = sample.name, tuple(sorted(sample.labels.items()))
            values = [sample.value, *([found[key].value] if key in found else ())]
            value = max(values) if metric.name == LAST_SUCCESS else sum(values)
            found[key] = sample._replace(value=value)
        metric.samples = [*found.values()]
        yield metric


def write(path: Path, metrics: Iterable[Metric]) -> None:
    """Write metrics to a file beside the one at ``path``, and rename it; raises ``OSError``."""
    write_to_textfile(str(path), _Source(lambda: metrics))


def text(metrics: Iterable[Metric]) -> str:
    """Return metrics as an exposition."""
    return generate_latest(_Source(lambda: metrics)).decode().rstrip("\n")
