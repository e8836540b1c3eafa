"""Oversees one run: its pause, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcl_processor.oversight import Hold
from dcl_processor.report.report import Report

from .desk import POLL, is_inline
from .orders import Orders
from .recording import Work

if TYPE_CHECKING:
    from dcl_processor.options.options import Definition
    from dcl_processor.report.counters import Counters

    from .ledger import Ledger, Record


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
        self._hands_out = hands_out
        self._tokens = None if processor.rate is None else ledger.tokens_of(processor)
        #: The window of the rows that were let start last.
        self.window = 0

    @property
    def _orders(self) -> Orders | None:
        return self._ledger.orders.get(self._name)

    def must_stop(self) -> bool:
        """Return whether no row may start, also within a batch."""
        orders = self._orders
        return orders is not None and orders.is_paused

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
        return None if self._tokens is None else self._tokens.hold()

    def take(self, rows: int) -> int:
        """Return how many of so many rows may start."""
        if self.must_stop():
            return 0
        if self._tokens is not None:
            rows, self.window = self._tokens.take(rows)
        return rows

    def give_back(self, rows: int, window: int) -> None:
        """Take note that a batch of a window has ended, of which so many rows did not start."""
        if self._tokens is not None:
            self._tokens.give_back(rows, window)

    def end(self, report: Report, error: BaseException | None) -> None:
        """Take note of the end of the run."""
        if not self._hands_out:
            self.work.end(self)
        self._ledger.end_run(self, report, error)
