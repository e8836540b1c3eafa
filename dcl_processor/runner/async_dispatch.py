"""Delivers batches whose handlers run on an event loop: claim after claim, without a gap.

Otherwise a batch would last as long as its slowest handler, and the other handlers would have
nothing to do meanwhile. So the run's thread claims again as soon as enough handlers have ended, in
whichever batches, and settles the rows of each batch as they end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from dcl_processor.candidates.pending import Question
from dcl_processor.delivery.batch import Outcomes, Steps
from dcl_processor.execution.event_loop import EventLoop

from .dispatch import Deliver, Pks

#: The part of the handlers' places that must be free before more rows are claimed, because rows
#: claimed one by one would cost a transaction each.
WORTH_CLAIMING = 1 / 4


@dataclass(slots=True, eq=False)
class _Live:
    pks: Pks
    steps: Steps
    #: Rows that wait for a free handler's place.
    waiting: int = 0


class AsyncDispatcher:
    """Delivers batches whose handlers share an event loop, in the thread that dispatches them.

    ``size``: rows that a claim takes, or more if more handlers than that may start. No batch may
    choose among more candidates, for the same reason as in ``ThreadDispatcher``.
    """

    may_choose = False

    def __init__(self, deliver: Deliver, loop: EventLoop, *, size: int) -> None:
        self._deliver = deliver
        self._loop = loop
        self._size = size
        self._live: list[_Live] = []
        self._over: list[tuple[Pks, Outcomes]] = []

    @property
    def room(self) -> int:
        """Return how many rows the next batch may have."""
        return max(self._size, self._loop.free)

    @property
    def rows_under_way(self) -> int:
        return sum(len(each.pks) for each in self._live)

    def begin(self, question: Question[Any], pks: Pks, most: int) -> None:
        """Claim a batch and start its handlers, as many as there is room for."""
        batch = _Live(pks, self._deliver(question, pks, most))
        self._live.append(batch)
        self._go_on(batch)

    def ended(self, *, everything: bool = False) -> Iterator[tuple[Pks, Outcomes]]:
        """Return ended batches; wait until a batch is worth claiming, or until all have ended.

        Raises the error of a batch; the other batches stay in flight.
        """
        enough = max(1, int(self._loop.concurrency * WORTH_CLAIMING))
        while True:
            for batch in [*self._live]:
                self._go_on(batch)
            idle = self._loop.free >= enough and not any(each.waiting for each in self._live)
            if not self._live or (idle and not everything):
                break
            self._loop.wait()
        over, self._over = self._over, []
        return iter(over)

    def look_again(self) -> None:
        """Do nothing: claiming and dispatching happen in this thread."""

    def close(self) -> None:
        """Cancel the handlers that an interrupt left in flight; each batch settles ended rows."""
        with ExitStack() as stack:
            if self._live:
                self._loop.give_up()
            for batch in self._live:
                stack.callback(batch.steps.close)
            self._live = []
            # As in Alone.close().
            del self._deliver

    def _go_on(self, batch: _Live) -> None:
        try:
            batch.waiting = next(batch.steps)
        except StopIteration as end:
            self._over.append((batch.pks, end.value))
            self._live.remove(batch)
        except BaseException:
            self._live.remove(batch)
            raise
