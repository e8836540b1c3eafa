"""Delivers a run's batches in the run's own thread, in several threads beside it, or in both.

The run's thread reads the candidates, dispatches batches and counts their outcomes. The threads
claim, handle and settle rows, each on its own database connection. So a run has one report and one
walk, whichever threads do the work. If the handlers run on an event loop, the run's own thread
claims and settles the rows of all of them.
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
    """Run all steps of a batch whose handlers do not wait for an event loop."""
    try:
        next(steps)
    except StopIteration as end:
        outcomes: Outcomes = end.value
        return outcomes
    raise AssertionError("a plain handler was waited for")


class Dispatcher(Protocol):
    """The interface of every dispatcher.

    ``room``: rows that the next batch may have; ``may_choose``: whether a batch may get more
    candidates than it claims; ``rows_under_way``: rows of batches in flight.
    """

    may_choose: bool

    @property
    def room(self) -> int:
        raise NotImplementedError

    @property
    def rows_under_way(self) -> int:
        raise NotImplementedError

    def begin(self, question: Question[Any], pks: Pks, most: int) -> None:
        """Dispatch a batch of at most ``most`` of the candidates; there must be room for it."""

    def ended(self, *, everything: bool = False) -> Iterator[tuple[Pks, Outcomes]]:
        """Return ended batches; wait until there is room for a batch, or until all have ended."""
        raise NotImplementedError

    def look_again(self) -> None:
        """Make ``ended`` check again, because there may be room now."""

    def close(self) -> None:
        """End everything in flight, and release the run."""


class InlineDispatcher:
    """Delivers each batch at once, in the thread that dispatches it."""

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
        """Do nothing: only this thread delivers."""

    def close(self) -> None:
        """Release the run, which would otherwise wait for the garbage collector."""
        del self._deliver


class ThreadDispatcher:
    """Delivers batches in threads, one batch at a time in each.

    ``may_share``: whether more than one batch may be in flight; the first flips of a run are
    rehearsed before any other handler starts. ``leave``: called by each thread when it ends. No
    thread may choose among more candidates: the other threads could not get the candidates that it
    leaves until its batch has ended.
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
        """Dispatch a batch; there must be room for it."""
        if len(self._threads) <= self._batches:
            self._start_one()
        self._batches += 1
        self.rows_under_way += len(pks)
        self._begun.put((question, pks, most))

    def ended(self, *, everything: bool = False) -> Iterator[tuple[Pks, Outcomes]]:
        """Yield ended batches; wait until there is room for a batch, or until all have ended.

        Raises the error of a batch after the other batches in flight have ended, too.
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
        """Make ``ended`` check again; called by a thread when there may be room now."""
        self._done.put(None)

    def close(self) -> None:
        """End the threads; a thread that an interrupt left at work ends after its row."""
        for _ in self._threads:
            self._begun.put(None)
        if not self._batches:
            for thread in self._threads:
                thread.join()
            # As in Alone.close().
            del self._deliver, self._may_share, self._leave

    def _start_one(self) -> None:
        number = len(self._threads) + 1
        # The caller's context, which a log needs; Django's language and time zone are not copied.
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
