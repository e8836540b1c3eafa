"""The metrics of runs, by their names; counters' samples have ``_total`` behind the name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
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
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dcl_processor import steady as time
from dcl_processor.log_fields import Running
from dcl_processor.metrics import AGES, DURATIONS, LAST_SUCCESS, ROWS, Samples, added, succeeded
from dcl_processor.observers import Handling, Observer
from dcl_processor.report import TRIED, Report

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

    ``names``: processors that have samples before anything happens. ``is_share``: runs here are
    parts of a run, whose success is not known in this process.
    """

    def __init__(
        self, registry: CollectorRegistry, names: Iterable[str] = (), *, is_share: bool = False
    ) -> None:
        self._is_share = is_share
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
        if error is None and not self._is_share and succeeded(report):
            self._success.labels(running.name).set_to_current_time()


class Counts(ProcessMetrics):
    """What was counted in this process, and in those that it has started."""

    def __init__(self, names: Iterable[str] = (), *, is_share: bool = False) -> None:
        registry = CollectorRegistry()
        super().__init__(registry, names, is_share=is_share)
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

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def serve(read: Callable[[], Samples], address: str, port: int) -> Callable[[], None]:
    """Serve the metrics over HTTP, from a thread; return what ends that.

    Raises ``OSError`` if the port cannot be had.
    """
    own = CollectorRegistry()
    own.register(_Source(lambda: families(read())))
    server, thread = start_http_server(port, addr=address, registry=own)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


# --- a file for node_exporter's textfile collector, to which commands add what they have counted
#
# A command that cron starts counts from 0. Were its counts written as they are, Prometheus would
# take each run for a restart, and a run that failed would remove the time of the last success. So
# the file is read before it is written, under a lock, because two commands may write to it.


# Windows has no fcntl: there two commands must not write to one file.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None


#: Seconds to wait for the lock, and between two looks at it.
LOCKED_WITHIN, PAUSE = 5.0, 0.02


def add_to_file(path: Path, samples: Samples) -> None:
    """Add samples to those in the file; readers see the old file, or the new one.

    Raises ``OSError`` if the file cannot be written, and ``TimeoutError`` if another process keeps
    its lock. A file with other contents is replaced, such as buckets of another version.
    """
    with _locked(path.with_name(f"{path.name}.lock")):
        write(path, families(added(_read(path), samples)))


def _read(path: Path) -> Samples:
    try:
        text = path.read_text(encoding="utf-8")
        found = _samples(text_string_to_metric_families(text))
    except (FileNotFoundError, ValueError):
        return {}
    bounds = {dict(labels).get("le") for _, labels in found}
    return found if bounds <= {None, "+Inf", *map(str, (*DURATIONS, *AGES))} else {}


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
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


def write(path: Path, metrics: Iterable[Metric]) -> None:
    """Write metrics to a file beside the one at ``path``, and rename it; raises ``OSError``."""
    write_to_textfile(str(path), _Source(lambda: metrics))


def text(metrics: Iterable[Metric]) -> str:
    """Return metrics as an exposition."""
    return generate_latest(_Source(lambda: metrics)).decode().rstrip("\n")
