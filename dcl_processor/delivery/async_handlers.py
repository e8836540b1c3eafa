"""The asynchronous handlers of one batch, which share an event loop with those of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from django.db.models import Model

from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.handler import Failed, Outcome

from .batch import Batch
from .settle import settle, settle_ended

M = TypeVar("M", bound=Model)


class AsyncHandlers(Generic[M]):
    """Starts the handlers of a batch as the event loop has room, and settles those that ended.

    ``rows``: yields each row when its handler may start. ``refused``: the outcomes of rows whose
    handlers may not start, which are settled at the end.
    """

    def __init__(
        self,
        batch: Batch[M],
        loop: EventLoop,
        rows: Iterator[tuple[Any, M]],
        refused: Sequence[tuple[Any, Outcome]],
    ) -> None:
        assert batch.marked is not None
        self._batch = batch
        self._marked = batch.marked
        self._prepares = batch.processor._prepares_taken_over
        self._loop = loop
        self._rows = rows
        self._refused = refused
        self._in_flight: set[Any] = set()
        self._has_more = True
        self._stack = ExitStack()
        self._resource = self._stack.enter_context(batch.context.resource.lent())
        self.are_over = False

    @property
    def waiting(self) -> int:
        """The number of rows that wait for a free handler slot."""
        return len(self._batch.rows) - len(self._batch.started) if self._has_more else 0

    def go_on(self) -> None:
        """Settle the rows whose handlers have ended, and start as many others as there is room."""
        self._settle_ended()
        while self._has_more and self._loop.free:
            found = next(self._rows, None)
            if found is None:
                self._has_more = False
                break
            pk, row = found
            is_taken_over = self._prepares and self._marked.is_taken_over(pk)
            self._batch.started.add(pk)
            self._in_flight.add(pk)
            self._loop.start(
                self._batch.processor,
                pk,
                row,
                self._resource.arguments,
                is_taken_over=is_taken_over,
            )
        if not (self._has_more or self._in_flight):
            for pk, outcome in self._refused:
                settle(self._batch, pk, outcome)
            self.are_over = True

    def _settle_ended(self) -> None:
        batch, loop, marked = self._batch, self._loop, self._marked
        while ended := loop.ended(self._in_flight):
            # Recorded here before the loop forgets them, because an interrupt may come in between.
            marked.ended.update(ended)
            loop.forget(ended)
            self._in_flight.difference_update(ended)
            self._resource.is_worn |= any(isinstance(each, Failed) for each in ended.values())
            settle_ended(batch)

    def close(self) -> None:
        """Cancel the handlers that are in flight; those that end all the same are to be settled."""
        with self._stack:
            # Before the resource that they use is closed, and before the other rows are put back.
            if self._in_flight:
                self._marked.ended.update(self._loop.cancel(self._in_flight))
                self._in_flight.clear()
