"""Samples of metrics: what they are called, and how a process adds and sends them.

A sample has the name and the labels that Prometheus knows it by. So those of several processes are
added one by one, whatever the metric is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dcl_processor import observers
from dcl_processor.report import Report

#: Values by the name of the sample and its labels, which are sorted.
Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

ROWS = "dcl_processor_rows"
LAST_SUCCESS = "dcl_processor_last_success_timestamp_seconds"

#: Upper bounds of durations, in seconds. Libraries' defaults end at 10 s; handlers take minutes.
DURATIONS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

#: Upper bounds of the age of a row, in seconds: a second to a week.
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 604_800.0)

#: Seconds between two messages of a worker that counts something.
INTERVAL = 1.0


def succeeded(report: Report) -> bool:
    """Return whether a run succeeded: it could start rows, and no row failed for good."""
    is_held_back = report.stopped in {"failures", "paused", "throttled", "busy"}
    return report.failed == report.to_retry and report.error is None and not is_held_back


def added(one: Samples, other: Samples) -> Samples:
    """Return sums, and the later one of two times."""
    both = dict(one)
    for key, value in other.items():
        before = both.get(key, 0.0)
        both[key] = max(before, value) if key[0] == LAST_SUCCESS else before + value
    return both


@contextmanager
def sent(send: Callable[[Samples], None], counter: Any) -> Iterator[None]:
    """Send what ``counter`` counts in the block, each second and at its end.

    It is an observer that has ``samples()``.
    """
    before: Samples = {}

    def hand_over() -> None:
        nonlocal before
        now: Samples = counter.samples()
        new = {
            key: value if key[0] == LAST_SUCCESS else value - before.get(key, 0.0)
            for key, value in now.items()
            if value != before.get(key)
        }
        if new:
            send(new)
            before = now

    observers.add(counter)
    try:
        with _repeated(hand_over, INTERVAL):
            yield
    finally:
        observers.remove(counter)
        hand_over()


@contextmanager
def _repeated(call: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call the function each so many seconds, in a thread, until the block ends.

    An idle worker has no other moment for it: it may wait for its next row for an hour.
    """
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=go_on, name="dcl_processor.metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
