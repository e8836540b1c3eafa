"""The metrics that only the database knows: what waits, since when, and what is stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dcl_processor import steady as time
from dcl_processor.insights import status as insights
from dcl_processor.insights.answer import Answer, How, Moment
from dcl_processor.processor import BatchProcessor

#: Seconds for which what was read from the database is served again, at least.
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
    """Exposes what the database knows; reads it again when it is older than ``fresh_for`` seconds.

    ``seconds``: the time limit of each question. A gauge whose question was not answered is absent,
    because 0 would be taken for the answer.
    """

    def __init__(
        self,
        processors: Callable[[], Iterable[BatchProcessor[Any]]],
        *,
        using: str | None = None,
        seconds: float = insights.TIMEOUT,
        fresh_for: float = FRESH_FOR,
    ) -> None:
        self._processors = processors
        self._using = using
        self._seconds = seconds
        self._fresh_for = max(FRESH_FOR, fresh_for)
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._metrics: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; scrapes that come at once wait for one reading."""
        with self._lock:
            now = time.monotonic()
            if self._read_at is None or now - self._read_at >= self._fresh_for:
                found = read(self._processors(), using=self._using, seconds=self._seconds)
                self._metrics = list(gauges(found))
                # From the end of the reading, which may take long itself.
                self._read_at = time.monotonic()
            return list(self._metrics)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registry asks the database no question."""
        return []


def read(
    processors: Iterable[BatchProcessor[Any]], *, using: str | None, seconds: float
) -> list[insights.Status]:
    """Ask the database about each processor; ``seconds``: the time limit of each question."""
    down: dict[str, str] = {}
    return [
        insights.status(each, using=using, seconds=seconds, only=[*GAUGES], down=down)
        for each in processors
    ]


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
    # An estimate follows the statistics of the table, and not the rows.
    return answer.how in (How.UNKNOWN, How.ESTIMATED)


def _value(answer: Answer[Any]) -> float | None:
    if _is_unknown(answer) or answer.how is How.NOT_RECORDED:
        return None
    if isinstance(answer.value, Moment):
        return max(0.0, answer.value.seconds)
    # An exact answer without a value is a time of no row.
    return float(answer.value or 0) + (answer.how is How.MORE_THAN)
