"""Delivers a run's batches in the run's own thread, in several threads beside it, or in both.

The run's thread reads the candidates, dispatches batches and counts their outcomes. The threads
claim, handle and settle rows, each on its own database connection. So a run has one report and one
scan, whichever threads do the work. If the handlers run on an event loop, the run's own thread
claims and settles the rows of all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from django.db import connections

from dcl_processor.delivery.batch import Batch, Context
from dcl_processor.delivery.deliveries import deliver
from dcl_processor.execution.handler import Handled
from dcl_processor.interrupts import wait_for_next


def has_failed(batch: Batch[Any]) -> bool:
    """Return whether one of the rows was not handled."""
    return not {Handled}.issuperset(map(type, batch.outcomes.values()))


class Dispatcher(Protocol):
    """The interface of every dispatcher.

    ``room``: rows that the next batch may have; ``may_choose``: whether a batch may get more
    candidates than it claims; ``rows_in_flight``: rows of batches that were not returned yet.
    """

    may_choose: bool

    @property
    def room(self) -> int:
        raise NotImplementedError

    @property
    def rows_in_flight(self) -> int:
        raise NotImplementedError

    def begin(self, batch: Batch[Any]) -> None:
        """Dispatch a batch; there must be room for it."""

    def ended(self, *, everything: bool = False, one: bool = False) -> Iterator[Batch[Any]]:
        """Return ended batches; wait until there is room for a batch, or until all have ended.

        ``one``: wait until there is one.
        """
        raise NotImplementedError

    def confirm(self) -> None:
        """Send the COMMITs that wait for the next claim of this thread."""

    def close(self) -> None:
        """End everything in flight."""

    def left(self) -> Iterator[Batch[Any]]:
        """Return the batches that have ended, also by an error, and were not returned yet."""
        raise NotImplementedError


class InlineDispatcher:
    """Delivers each batch at once, in the thread that dispatches it.

    The COMMIT of a batch may be sent with the claim of the next one: the batch is in flight until
    then. ``may_wait``: whether it may, because no user code is called in between.
    """

    may_choose = True

    def __init__(self, context: Context, *, size: int, may_wait: Callable[[], bool]) -> None:
        self._context = context
        #: Rows that the next batch may have.
        self.room = size
        self._may_wait = may_wait
        self._begun: list[Batch[Any]] = []

    @property
    def rows_in_flight(self) -> int:
        # Also those whose COMMIT was sent before another statement, and that are not counted yet.
        rows = 0
        for batch in self._begun:
            rows += len(batch.rows)
        return rows

    def begin(self, batch: Batch[Any]) -> None:
        self._begun.append(batch)
        deliver(batch)
        # A failure is logged, and a log handler may use this connection.
        if batch.is_unconfirmed and (has_failed(batch) or not self._may_wait()):
            self.confirm()

    def ended(self, *, everything: bool = False, one: bool = False) -> Iterator[Batch[Any]]:
        if everything or one:
            self.confirm()
        waiting = self._context.transactions.unconfirmed
        ended = [batch for batch in self._begun if batch is not waiting]
        self._begun = [] if waiting is None else [waiting]
        return iter(ended)

    def confirm(self) -> None:
        self._context.transactions.confirm()

    def close(self) -> None:
        """Send the last COMMIT."""
        self.confirm()

    def left(self) -> Iterator[Batch[Any]]:
        return self.ended()


class ThreadDispatcher:
    """Delivers batches in threads, one batch at a time in each.

    More than one batch is in flight only after the first flips of the run were rehearsed. While
    rows succeed, a batch for each thread is dispatched in advance, so that a thread can send the
    COMMIT of one batch with the claim of the next.
    No thread may choose among more candidates: the other threads could not get the candidates that
    it leaves until its batch has ended.
    """

    may_choose = False

    def __init__(
        self, context: Context, *, size: int, number: int, in_advance: Callable[[], bool]
    ) -> None:
        self._context = context
        self.room = size
        self._number = number
        self._in_advance = in_advance
        #: An error ends the run: batches that are still to be delivered are given back.
        self._is_over = False
        self._threads: list[threading.Thread] = []
        self._begun: SimpleQueue[Batch[Any] | None] = SimpleQueue()
        #: Ended batches, with an error that ended one; ``None``: there may be room now.
        self._done: SimpleQueue[tuple[Batch[Any], BaseException | None] | None] = SimpleQueue()
        self._failed: list[Batch[Any]] = []
        self._batches = 0
        self.rows_in_flight = 0
        done = self._done
        context.on_rehearsed = lambda: done.put(None)
        context.on_confirmed = lambda batch, error: done.put((batch, error))

    def begin(self, batch: Batch[Any]) -> None:
        """Dispatch a batch; there must be room for it."""
        if len(self._threads) <= min(self._batches, self._number - 1):
            self._start_one()
        self._batches += 1
        self.rows_in_flight += len(batch.wanted.pks)
        self._begun.put(batch)

    def ended(self, *, everything: bool = False, one: bool = False) -> Iterator[Batch[Any]]:
        """Yield ended batches; wait until there is room for a batch, or until all have ended.

        ``one``: wait until there is one. Raises the error of a batch after the other batches in
        flight have ended, too.
        """
        first: BaseException | None = None
        while self._batches:
            full = self._batches >= self._most
            may_wait = full or everything or one or first is not None
            try:
                ended = wait_for_next(self._done) if may_wait else self._done.get_nowait()
            except Empty:
                break
            if ended is None:
                continue
            batch, error = ended
            self._batches -= 1
            self.rows_in_flight -= len(batch.wanted.pks)
            if error is None:
                one = False
                yield batch
            else:
                self._failed.append(batch)
                first = first or error
        if first is not None:
            raise first

    @property
    def _most(self) -> int:
        """Batches that may be in flight, those in advance included."""
        if self._context.rehearsal is None:
            return 1
        return self._number * (2 if self._in_advance() else 1)

    def confirm(self) -> None:
        """Do nothing, because each thread does it when no batch waits for it."""

    def close(self) -> None:
        """End the threads; a thread that an interrupt left at work ends after its row."""
        for _ in self._threads:
            self._begun.put(None)
        if not self._batches:
            for thread in self._threads:
                thread.join()

    def left(self) -> Iterator[Batch[Any]]:
        yield from self._failed
        with suppress(Empty):
            while True:
                ended = self._done.get_nowait()
                if ended is not None:
                    yield ended[0]

    def _start_one(self) -> None:
        number = len(self._threads) + 1
        name = f"{self._context.processor.name}: handlers: {number}"
        # The caller's context, which a log needs; Django's language and time zone are not copied.
        target = copy_context().run
        thread = threading.Thread(target=target, args=(self._serve,), name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        try:
            while (batch := self._next()) is not None:
                error: BaseException | None = None
                try:
                    if not self._is_over:
                        deliver(batch)
                except BaseException as raised:  # noqa: BLE001  # for the run's thread
                    error, self._is_over = raised, True
                if has_failed(batch):
                    self._give_back()
                if error is not None or not batch.is_unconfirmed:
                    self._done.put((batch, error))
                batch = error = None  # or this frame would keep them
        finally:
            self._context.leave_thread()
            connections.close_all()

    def _give_back(self) -> None:
        """Give back the batches in advance, because the run may end by a failure."""
        with suppress(Empty):
            while (batch := self._begun.get_nowait()) is not None:
                self._done.put((batch, None))
            self._begun.put(None)

    def _next(self) -> Batch[Any] | None:
        """Return the next batch; if there is none yet, first send the COMMIT that waits."""
        try:
            return self._begun.get_nowait()
        except Empty:
            try:
                self._context.transactions.confirm()
            except BaseException:  # noqa: BLE001  # handed over with its batch
                self._is_over = True
            return self._begun.get()
