"""The metrics of runs in this process, written to the client's own objects.

Only these work in the client's multi-process mode.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dcl_processor.log_fields import Running
from dcl_processor.metrics.collector import succeeded
from dcl_processor.metrics.tally import AGES, DURATIONS, OUTCOMES
from dcl_processor.observers import Handling, Observer
from dcl_processor.report import Report

from .exposition import AGE, HANDLER, HELP, LAST_SUCCESS, LOCK, LOST_LEASES, RETRIES, ROWS


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
