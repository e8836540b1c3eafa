"""Oversees one run: its pause, its breaker, and its tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dcl_processor import steady as time
from dcl_processor.oversight import Hold
from dcl_processor.report import Report

from . import orders as control
from .desk import POLL, UnreachableError, is_inline
from .orders import Orders
from .recording import Work

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition
    from dcl_processor.runner.counters import Counters

    from .ledger import Ledger, Record

T = TypeVar("T")

#: Seconds between two looks whether the one row that is tried has ended.
LOOK = 0.05


class RunOverseer:
    """What a run asks before it starts rows; all but ``must_stop()`` by the run's own thread.

    ``record``: that of the run, if it is not a part of a command.
    """

    def __init__(
        self,
        ledger: Ledger,
        processor: Definition[Any],
        counts: Counters,
        work: Work,
        record: Record | None,
        *,
        hands_out: bool,
    ) -> None:
        self.work = work
        self.counts = counts.counts
        self.record = record
        self._ledger = ledger
        self._name = processor.name
        self._breaker = processor.breaker
        self._hands_out = hands_out
        self._tokens = None if processor.rate is None else ledger.tokens_of(processor)
        #: The window of the rows that were let start last.
        self.window = 0
        #: Whether this run is the one that tries a row, and whether it has started the row.
        self._probe: Literal["no", "free", "started"] = "no"
        #: Since when the breaker has held this run, by the monotonic clock.
        self._held_since = 0.0
        #: Batches that have begun, and have not ended.
        self._batches = 0
        self._has_succeeded = False

    def _call(self, do: Callable[[], T]) -> T:
        return self._ledger.desk.call(do)

    @property
    def _orders(self) -> Orders | None:
        return self._ledger.orders.get(self._name)

    def must_stop(self) -> bool:
        """Return whether no row may start, also within a batch."""
        orders = self._orders
        if orders is None:
            return False
        if orders.is_paused or self._ledger.is_stopped(self.work):
            return True
        return self._breaker is not None and self._probe == "no" and orders.opens_in is not None

    def hold(self) -> Hold | None:
        """Return why no row may start now; called outside any transaction of the run."""
        orders = self._orders
        if orders is None:
            return None
        if orders.age > POLL and is_inline():
            self._ledger.read([self._name])  # there is no thread that reads
            orders = self._orders or orders
        if orders.is_paused:
            return Hold("paused")
        if self._ledger.is_stopped(self.work):
            return Hold("operator")
        if self._breaker is not None and (hold := self._hold_of_breaker(orders)) is not None:
            return hold
        return None if self._tokens is None else self._tokens.hold()

    def _hold_of_breaker(self, orders: Orders) -> Hold | None:
        if self._probe == "started":
            return Hold("breaker", LOOK)
        if self._probe == "free" or orders.opens_in is None:
            return None
        if self._batches:
            # Race: two probes. The end of a row that started before is not that of the probe.
            return Hold("breaker", LOOK)
        if self._hands_out:
            return Hold("breaker")
        breaker, now = self._breaker, time.monotonic()
        assert breaker is not None
        if orders.open_for > 0:
            self._held_since = self._held_since or now
            # After more than a pause another worker tries a row, which may take long.
            is_long = now > self._held_since + breaker.seconds + POLL
            return Hold("breaker", None if is_long else max(orders.open_for, LOOK))
        with suppress(UnreachableError):
            if self._call(lambda: control.take_probe(self._name, breaker)):
                self._probe, self._held_since = "free", 0.0
            self._ledger.read([self._name])
        if self._probe == "free" or (self._orders or orders).opens_in is None:
            return None
        # Another worker tries a row, which may take long.
        return Hold("breaker")

    def take(self, rows: int, *, whole: bool = False) -> int:
        """Return how many of so many rows may start."""
        if self._probe == "started" or self.must_stop():
            return 0
        if self._probe == "free" and not whole:
            rows = min(rows, 1)
        if self._tokens is not None:
            rows, self.window = self._tokens.take(rows, whole=whole)
        if rows and self._probe == "free":
            self._probe = "started"
        self._batches += rows > 0
        return rows

    def give_back(self, rows: int, window: int) -> None:
        """Take note that a batch of a window has ended, of which so many rows did not start."""
        self._batches -= 1
        if self._tokens is not None:
            self._tokens.give_back(rows, window)
        if self._probe == "started":
            self._probe = "free"

    def note(self, outcome: str) -> None:
        """Let a success or a failure change the breaker; the others show nothing."""
        if self._breaker is None or self._hands_out:
            return
        if outcome == "processed":
            self._succeeded()
        elif outcome == "failed":
            self._failed()

    def _succeeded(self) -> None:
        self._has_succeeded = True
        orders, is_probe = self._orders, self._probe != "no"
        self._probe = "no"
        if is_probe or (orders is not None and orders.failures > 0):
            noted = partial(control.note_success, self._name, self._ledger.id, is_probe=is_probe)
            self._change(noted)

    def _failed(self) -> None:
        breaker = self._breaker
        assert breaker is not None
        self._has_succeeded = False  # what is in a row begins now
        if self._probe != "no":
            self._probe = "no"
            self._change(lambda: control.set_probe(self._name, breaker.seconds, failures=1))
        else:
            self._change(lambda: control.count_failure(self._name, breaker, self._ledger.id))

    def _change(self, change: Callable[[], None]) -> None:
        # At once and not with the next poll: the next row depends on it.
        with suppress(UnreachableError):
            self._call(change)
            self._ledger.read([self._name])

    def tick(self) -> None:
        """Do what a breaker needs once a second; the thread of the ledger calls it."""
        if self._breaker is None:
            return
        if self._has_succeeded:
            self._has_succeeded = False
            control.note_success(self._name, self._ledger.id)
        if self._probe != "no":
            control.set_probe(self._name, self._breaker.seconds)

    def end(self, report: Report, error: BaseException | None) -> None:
        """Take note of the end of the run."""
        try:
            if self._probe != "no":
                self._probe = "no"
                self._change(lambda: control.set_probe(self._name, 0))
        finally:
            if not self._hands_out:
                self.work.end(self)
            self._ledger.end_run(self, report, error)
