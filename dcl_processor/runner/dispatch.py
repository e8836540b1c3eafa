"""Delivers a run's batches in the run's own thread, in several threads beside it, or in both.

The run's thread reads the candidates, dispatches batches and counts their outcomes. The threads
claim, handle and settle rows, each on its own database connection. So a run has one report and one
scan, whichever threads do the work. If the handlers run on an event loop, the run's own thread
claims and settles the rows of all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from django.db import connections

from dcl_processor.delivery.batch import Batch, Context
from dcl_processor.delivery.deliveries import deliver


class Dispatcher(Protocol):
    """The interface of every dispatcher.

    ``room``: rows that the next batch may have; ``may_choose``: whether a batch may get more
    candidates than it claims; ``rows_in_flight``: rows of batches that have not ended.
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

    def ended(self, *, everything: bool = False) -> Iterator[Batch[Any]]:
        """Return ended batches; wait until there is room for a batch, or until all have ended."""
        raise NotImplementedError

    def close(self) -> None:
        """End everything in flight."""

    def left(self) -> Iterator[Batch[Any]]:
        """Return the batches that have ended, also by an error, and were not returned yet."""
        raise NotImplementedError


class InlineDispatcher:
    """Delivers each batch at once, in the thread that dispatches it."""

    may_choose = True
    rows_in_flight = 0

    def __init__(self, *, size: int) -> None:
        #: Rows that the next batch may have.
        self.room = size
        self._ended: list[Batch[Any]] = []

    def begin(self, batch: Batch[Any]) -> None:
        try:
            deliver(batch)
        finally:
            self._ended.append(batch)

    def ended(self, *, everything: bool = False) -> Iterator[Batch[Any]]:  # noqa: ARG002  # nothing is in flight
        ended, self._ended = self._ended, []
        return iter(ended)

    def close(self) -> None:
        """Do nothing, because nothing is in flight."""

    def left(self) -> Iterator[Batch[Any]]:
        return self.ended()


class ThreadDispatcher:
    """Delivers batches in threads, one batch at a time in each.

    More than one batch is in flight only after the first flips of the run were rehearsed.
    No thread may choose among more candidates: the other threads could not get the candidates that
    it leaves until its batch has ended.
    """

    may_choose = False

    def __init__(self, context: Context, *, size: int, number: int) -> None:
        self._context = context
        self.room = size
        self._number = number
        self._threads: list[threading.Thread] = []
        self._begun: SimpleQueue[Batch[Any] | None] = SimpleQueue()
        #: Ended batches, with an error that ended one; ``None``: there may be room now.
        self._done: SimpleQueue[tuple[Batch[Any], BaseException | None] | None] = SimpleQueue()
        self._failed: list[Batch[Any]] = []
        self._batches = 0
        self.rows_in_flight = 0
        done = self._done
        context.on_rehearsed = lambda: done.put(None)

    def begin(self, batch: Batch[Any]) -> None:
        """Dispatch a batch; there must be room for it."""
        if len(self._threads) <= self._batches:
            self._start_one()
        self._batches += 1
        self.rows_in_flight += len(batch.wanted.pks)
        self._begun.put(batch)

    def ended(self, *, everything: bool = False) -> Iterator[Batch[Any]]:
        """Yield ended batches; wait until there is room for a batch, or until all have ended.

        Raises the error of a batch after the other batches in flight have ended, too.
        """
        first: BaseException | None = None
        while self._batches:
            full = self._batches >= (1 if self._context.rehearsal is None else self._number)
            try:
                ended = self._done.get(block=full or everything or first is not None)
            except Empty:
                break
            if ended is None:
                continue
            batch, error = ended
            self._batches -= 1
            self.rows_in_flight -= len(batch.wanted.pks)
            if error is None:
                yield batch
            else:
                self._failed.append(batch)
                first = first or error
        if first is not None:
            raise first

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
            while (batch := self._begun.get()) is not None:
                error: BaseException | None = None
                try:
                    deliver(batch)
                except BaseException as raised:  # noqa: BLE001  # for the run's thread
                    error = raised
                self._done.put((batch, error))
                batch = error = None  # or this frame would keep them
        finally:
            self._context.leave_thread()
            connections.close_all()
