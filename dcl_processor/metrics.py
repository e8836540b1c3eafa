"""Collects tallies in this process, by looking on at its runs."""

from __future__ import annotations

import copy
import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dcl_processor import observers
from dcl_processor import steady as time
from dcl_processor.log_fields import Running
from dcl_processor.observers import Handling, Observer
from dcl_processor.report import Report


def succeeded(report: Report) -> bool:
    """Return whether a run succeeded: it could start rows, and no row failed for good."""
    is_held_back = report.stopped in {"failures", "paused", "breaker", "throttled", "busy"}
    return report.failed == report.to_retry and report.error is None and not is_held_back


class Collector(Observer):
    """The tallies of the processors that ran in this process, or in those that it has started.

    ``names``: processors that are to have a tally before anything happens. ``is_share``: runs here
    are parts of a run, whose success is not known in this process.
    """

    def __init__(self, names: Iterable[str] = (), *, is_share: bool = False) -> None:
        self._is_share = is_share
        self._lock = threading.Lock()
        self._tallies = defaultdict(Tally, {name: Tally() for name in names})

    def claimed(self, name: str, ages: Sequence[float]) -> None:
        with self._lock:
            for each in ages:
                self._tallies[name].age.add(each)

    def unlocked(self, name: str, seconds: float) -> None:
        with self._lock:
            self._tallies[name].lock.add(seconds)

    def handler_ended(self, handling: Handling, error: BaseException | None) -> None:  # noqa: ARG002  # as in Observer
        call = handling.call
        if call.duration is not None:
            with self._lock:
                self._tallies[call.label].handler.add(call.duration)

    def row_ended(self, name: str, outcome: str, *, is_retried: bool) -> None:
        with self._lock:
            tally = self._tallies[name]
            if outcome in OUTCOMES:
                tally.rows[outcome] += 1
            else:
                tally.lost_leases += 1
            tally.retries += is_retried

    def run_ended(self, running: Running, report: Report, error: BaseException | None) -> None:
        if error is None and not self._is_share and succeeded(report):
            with self._lock:
                self._tallies[running.name].last_success = time.time()

    def add(self, name: str, tally: Tally) -> None:
        """Add what another process counted, or what was taken and could not be passed on."""
        with self._lock:
            self._tallies[name].merge(tally)

    def snapshot(self) -> Mapping[str, Tally]:
        """Return a copy of all tallies, by the processors' names."""
        with self._lock:
            return copy.deepcopy(self._tallies)

    def take(self) -> Mapping[str, Tally]:
        """Return what was counted since the last call, and set the counts to zero."""
        with self._lock:
            taken, self._tallies = self._tallies, defaultdict(Tally)
        return taken


# --- counts and distributions of one processor: they can be added, sent and kept
#
# Buckets are counted alone here, and not cumulated as in an exposition, so that two tallies are
# added field by field.


#: The outcomes of rows that a handler was called for, as ``row_finished`` has them.
OUTCOMES = ("processed", "failed", "discarded", "snoozed")

#: Upper bounds of durations, in seconds. Libraries' defaults end at 10 s; handlers take minutes.
DURATIONS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)

#: Upper bounds of the age of a row, in seconds: a second to a week.
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0, 604_800.0)


@dataclass(slots=True)
class Distribution:
    """How many values were at most each bound; the last count is for values above all bounds."""

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: Distribution) -> None:
        """Add the counts of another one with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def number(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


def _durations() -> Distribution:
    return Distribution(DURATIONS)


@dataclass(slots=True)
class Tally:
    """What one processor did.

    ``rows``: by outcome. ``retries``: failed rows that are to be tried again. ``lost_leases``: rows
    that another worker had taken over at their settlement. ``handler``: seconds of each call.
    ``lock``: seconds for which each transaction held the locks of its rows. ``age``: seconds for
    which each row was pending at its claim. ``last_success``: when a run last ended without a row
    that failed for good, in seconds since 1970.
    """

    rows: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    lost_leases: int = 0
    handler: Distribution = field(default_factory=_durations)
    lock: Distribution = field(default_factory=_durations)
    age: Distribution = field(default_factory=lambda: Distribution(AGES))
    last_success: float | None = None

    def merge(self, other: Tally) -> None:
        """Add another tally of the same processor."""
        self.rows.update(other.rows)
        self.retries += other.retries
        self.lost_leases += other.lost_leases
        self.handler.merge(other.handler)
        self.lock.merge(other.lock)
        self.age.merge(other.age)
        times = [each for each in (self.last_success, other.last_success) if each is not None]
        self.last_success = max(times, default=None)


# --- sends what a worker has counted to the process that has started it
#
# In a thread, as an idle worker has no moment for it: it may wait for its next row for an hour.


#: Seconds between two messages of a worker that counts something.
INTERVAL = 1.0


@contextmanager
def sent(send: Callable[[str, Tally], None], *, is_share: bool) -> Iterator[None]:
    """Send what is counted in the block, each second and at its end.

    ``is_share``: as for ``Collector``. ``send`` is called in a thread of its own.
    """
    collector = Collector(is_share=is_share)

    def send_all() -> None:
        for name, tally in collector.take().items():
            send(name, tally)

    observers.add(collector)
    try:
        with repeated(send_all, INTERVAL):
            yield
    finally:
        observers.remove(collector)
        send_all()


@contextmanager
def repeated(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call the function each so many seconds, in a thread, until the block ends."""
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
