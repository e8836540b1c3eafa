"""Who delivers a run's batches: the run's own thread, several threads beside it, or both.

The run's thread reads the candidates, hands out batches and counts what became of them; the
threads claim, handle and settle, each on a database connection of its own. So a run has one report
and one walk, whoever does the work. Where handlers are on an event loop, the run's own thread
claims and settles for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from django.db import connections

from dcl_processor.candidates.pending import Question
from dcl_processor.delivery.batch import Outcomes, Steps

Pks = Sequence[Any]
#: Takes candidates, and how many of them to claim.
Deliver = Callable[[Question[Any], Pks, int], Steps]


def at_once(steps: Steps) -> Outcomes:
    """Take a batch through all its steps, where none waits for an event loop."""
    try:
        next(steps)
    except StopIteration as end:
        outcomes: Outcomes = end.value
        return outcomes
    raise AssertionError("a plain handler was waited for")


class Crew(Protocol):
    """What all kinds have in common.

    ``room``: rows that the next batch may have; ``may_choose``: whether more candidates may be
    named to it; ``rows_under_way``: of batches that have not ended.
    """

    may_choose: bool

    @property
    def room(self) -> int:
        raise NotImplementedError

    @property
    def rows_under_way(self) -> int:
        raise NotImplementedError

    def begin(self, question: Question[Any], pks: Pks, most: int) -> None:
        """Hand out a batch of so many of the candidates; there must be room for it."""

    def ended(self, *, everything: bool = False) -> Iterator[tuple[Pks, Outcomes]]:
        """Return what has ended; wait until there is room for a batch, or until all have ended."""
        raise NotImplementedError

    def look_again(self) -> None:
        """Be told that there may be room now."""

    def close(self) -> None:
        """End whatever is under way, and let go of the run."""


class Alone:
    """Delivers each batch at once, in the thread that hands it out."""

    may_choose = True
    rows_under_way = 0

    def __init__(self, deliver: Deliver, *, size: int) -> None:
        self._deliver = deliver
        #: Rows that the next batch may have.
        self.room = size
        self._ended: list[tuple[Pks, Outcomes]] = []

    def begin(self, question: Question[Any], pks: Pks, most: int) -> None:
        self._ended.append((pks, at_once(self._deliver(question, pks, most))))

    def ended(self, *, everything: bool = False) -> Iterator[tuple[Pks, Outcomes]]:  # noqa: ARG002  # nothing is under way
        ended, self._ended = self._ended, []
        return iter(ended)

    def look_again(self) -> None:
        """Do nothing: nobody else is at work."""

    def close(self) -> None:
        """Let go of the run, which would otherwise wait for the garbage collector."""
        del self._deliver


class Threads:
    """Delivers batches in threads, one batch at a time in each.

    ``may_share``: whether more than one may be under way; the first flips of a run are rehearsed
    before any other handler starts. ``leave``: called by each thread when it ends. None may
    choose: what one thread does not take would be kept from the others until its batch has ended.
    """

    may_choose = False

    def __init__(
        self,
        deliver: Deliver,
        *,
        size: int,
        number: int,
        label: str,
        may_share: Callable[[], bool],
        leave: Callable[[], None],
    ) -> None:
        self._deliver = deliver
        self.room = size
        self._number = number
        self._label = label
        self._may_share = may_share
        self._leave = leave
        self._threads: list[threading.Thread] = []
        self._begun: SimpleQueue[tuple[Question[Any], Pks, int] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Pks, Outcomes | BaseException] | None] = SimpleQueue()
        self._batches = 0
        self.rows_under_way = 0

    def begin(self, question: Question[Any], pks: Pks, most: int) -> None:
        """Hand out a batch; there must be room for it."""
        if len(self._threads) <= self._batches:
            self._start_one()
        self._batches += 1
        self.rows_under_way += len(pks)
        self._begun.put((question, pks, most))

    def ended(self, *, everything: bool = False) -> Iterator[tuple[Pks, Outcomes]]:
        """Yield what has ended; wait until there is room for a batch, or until all have ended.

        Raises what a batch raised, when the others that are under way have ended, too.
        """
        error: BaseException | None = None
        while self._batches:
            full = self._batches >= (self._number if self._may_share() else 1)
            try:
                ended = self._done.get(block=full or everything or error is not None)
            except Empty:
                break
            if ended is None:
                continue
            pks, outcomes = ended
            self._batches -= 1
            self.rows_under_way -= len(pks)
            if isinstance(outcomes, BaseException):
                error = error or outcomes
            else:
                yield pks, outcomes
        if error is not None:
            raise error

    def look_again(self) -> None:
        """Be told, by one of the threads, that there may be room now."""
        self._done.put(None)

    def close(self) -> None:
        """End the threads; one that an interrupt left at work ends by itself, after its row."""
        for _ in self._threads:
            self._begun.put(None)
        if not self._batches:
            for thread in self._threads:
                thread.join()
            # As above.
            del self._deliver, self._may_share, self._leave

    def _start_one(self) -> None:
        number = len(self._threads) + 1
        # What a log needs to know of the caller; Django's language and time zone stay behind.
        context = copy_context()
        thread = threading.Thread(
            target=context.run, args=(self._serve,), name=f"{self._label}: {number}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        try:
            while (given := self._begun.get()) is not None:
                question, pks, most = given
                try:
                    outcomes: Outcomes | BaseException = at_once(self._deliver(question, pks, most))
                except BaseException as error:  # noqa: BLE001  # for the run's thread
                    outcomes = error
                self._done.put((pks, outcomes))
        finally:
            self._leave()
            connections.close_all()
