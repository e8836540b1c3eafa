"""Delivers batches whose handlers run on an event loop: claim after claim, without a gap.

Otherwise a batch would last as long as its slowest handler, and the other handlers would have
nothing to do meanwhile. So the run's thread claims again as soon as enough handlers have ended, in
whichever batches, and settles the rows of each batch as they end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from dcl_processor.delivery.batch import Batch
from dcl_processor.delivery.deliveries import deliver, finish
from dcl_processor.execution.event_loop import EventLoop

#: The part of the handlers' places that must be free before more rows are claimed, because rows
#: claimed one by one would cost a transaction each.
WORTH_CLAIMING = 1 / 4

#: Seconds after which fewer free places are filled, too, if no other handler has ended.
LINGER = 0.02


class AsyncDispatcher:
    """Delivers batches whose handlers share an event loop, in the thread that dispatches them.

    ``size``: rows that a claim takes, or more if more handlers than that may start; ``together``:
    a handler takes all rows of a claim. No batch may choose among more candidates, for the same
    reason as in ``ThreadDispatcher``.
    """

    may_choose = False

    def __init__(self, loop: EventLoop, *, size: int, together: bool = False) -> None:
        self._loop = loop
        self._size = size
        self._together = together
        #: Batches that were not returned yet; those that are over have no handlers any more.
        self._begun: list[Batch[Any]] = []

    @property
    def room(self) -> int:
        """Return how many rows the next batch may have."""
        return self._size if self._together else max(self._size, self._loop.free)

    @property
    def rows_in_flight(self) -> int:
        return sum(len(batch.wanted.pks) for batch in self._open())

    def _open(self) -> list[Batch[Any]]:
        return [batch for batch in self._begun if batch.handlers is not None]

    def begin(self, batch: Batch[Any]) -> None:
        """Claim a batch and start its handlers, as many as there is room for."""
        # Race: work without flip. Before its delivery: an interrupt at any point of it leaves the
        # batch to close(), which settles the rows whose handlers end all the same.
        self._begun.append(batch)
        deliver(batch)

    def ended(self, *, everything: bool = False, one: bool = False) -> Iterator[Batch[Any]]:
        """Return ended batches; wait until a batch is worth claiming, or until all have ended.

        ``one``: wait until there is one. Raises the error of a batch; the other batches stay in
        flight. A batch is worth claiming if there is room for several handlers, or if no handler
        has ended for a while: the others may be at work for hours, and a free place is to be used.
        """
        part = 0 if self._together else WORTH_CLAIMING
        enough = max(1, int(self._loop.concurrency * part))
        while True:
            for batch in self._open():
                self._go_on(batch)
            begun = self._open()
            waiting = any(batch.handlers and batch.handlers.waiting for batch in begun)
            idle = self._loop.free >= enough and not waiting
            is_enough = len(begun) < len(self._begun) if one else idle and not everything
            if not begun or is_enough:
                break
            may_linger = self._loop.free and not (waiting or everything or one)
            if not self._loop.wait(LINGER if may_linger else None):
                break
        over = [batch for batch in self._begun if batch.handlers is None]
        self._begun = begun
        return iter(over)

    def confirm(self) -> None:
        """Do nothing, because no COMMIT waits."""

    def close(self) -> None:
        """Cancel the handlers that an interrupt left in flight; each batch settles ended rows."""
        with ExitStack() as stack:
            if begun := self._open():
                self._loop.give_up()
            for batch in begun:
                stack.callback(finish, batch)

    def left(self) -> Iterator[Batch[Any]]:
        return iter(self._begun)

    def _go_on(self, batch: Batch[Any]) -> None:
        assert batch.handlers is not None
        try:
            batch.handlers.go_on()
        except Exception:
            finish(batch)
            raise
        if batch.is_over:
            finish(batch)
