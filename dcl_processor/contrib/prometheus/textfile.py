"""A file for node_exporter's textfile collector, to which commands add what they have counted.

A command that cron starts counts from 0. Were its counts written as they are, Prometheus would take
each run for a restart, and a run that failed would remove the time of the last success. So the file
is read before it is written, under a lock, because two commands may write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, write_to_textfile
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from dcl_processor import steady as time
from dcl_processor.metrics.collector import Distribution, Tally

from .exposition import AGE, HANDLER, LAST_SUCCESS, LOCK, LOST_LEASES, RETRIES, ROWS, families

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
            kept = self._read()
            for name, tally in tallies.items():
                kept.setdefault(name, Tally()).merge(tally)
            write(self._path, families(kept))

    def _read(self) -> dict[str, Tally]:
        try:
            return parsed(self._path.read_text(encoding="utf-8"))
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


class _Given(Collector):
    """Has metrics, as a registry collects them."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _registry(metrics: Iterable[Metric]) -> CollectorRegistry:
    own = CollectorRegistry()
    own.register(_Given(metrics))
    return own


def write(path: Path, metrics: Iterable[Metric]) -> None:
    """Write metrics to a file beside the one at ``path``, and rename it; raises ``OSError``."""
    write_to_textfile(str(path), _registry(metrics))


def text(metrics: Iterable[Metric]) -> str:
    """Return metrics as an exposition."""
    return generate_latest(_registry(metrics)).decode().rstrip("\n")


def parsed(text: str) -> dict[str, Tally]:
    """Return the tallies of an exposition; raises ``ValueError`` for other text."""
    found: dict[str, Tally] = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            name = sample.labels.get("processor")
            if name is not None:
                _put(found.setdefault(name, Tally()), metric, sample)
    return found


def _put(tally: Tally, metric: Metric, sample: Any) -> None:
    distributions = {HANDLER: tally.handler, LOCK: tally.lock, AGE: tally.age}
    match metric.name:
        case name if name == ROWS:
            tally.rows[sample.labels["outcome"]] += int(sample.value)
        case name if name == RETRIES:
            tally.retries += int(sample.value)
        case name if name == LOST_LEASES:
            tally.lost_leases += int(sample.value)
        case name if name == LAST_SUCCESS:
            tally.last_success = sample.value
        case name if name in distributions:
            _put_bucket(distributions[name], sample)


def _put_bucket(values: Distribution, sample: Any) -> None:
    """Take a bucket, whose count includes those of the buckets before it, or the sum."""
    if sample.name.endswith("_sum"):
        values.total = sample.value
    elif sample.name.endswith("_bucket"):
        bounds = [*map(str, values.bounds), "+Inf"]
        place = bounds.index(sample.labels["le"])  # a ValueError: of a version with others
        values.counts[place] = int(sample.value) - sum(values.counts[:place])
