"""The asynchronous handlers of one batch, which share an event loop with those of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from django.db.models import Model

from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.handler import Failed, Outcome

from .batch import Batch
from .settle import settle, settle_ended
from .together import Startable, outcomes_and_again

M = TypeVar("M", bound=Model)


class AsyncHandlers(Generic[M]):
    """Starts the handlers of a batch as the event loop has room, and settles those that ended.

    A handler gets one row, or with ``process_batch()`` all rows that may start. ``refused``: gets
    the outcomes of rows whose handlers may not start, which are settled at the end.
    """

    def __init__(
        self,
        batch: Batch[M],
        loop: EventLoop,
        startable: Startable[M],
        refused: Sequence[tuple[Any, Outcome]],
    ) -> None:
        assert batch.marked is not None
        self._batch = batch
        self._marked = batch.marked
        self._prepares = batch.processor._prepares_taken_over
        self._loop = loop
        self._refused = refused
        self._in_flight: set[Any] = set()
        #: The rows of each call of ``process_batch()``, by the key of its first row.
        self._calls: dict[Any, Mapping[Any, M]] = {}
        #: Rows that ``process_batch()`` is to be called with again, each alone.
        self._again: set[Any] = set()
        self._together = batch.processor._handles_batches
        self._startable = startable
        rows = startable(batch.rows)
        self._given: Iterator[tuple[Any, Any]] = _all_at_once(rows) if self._together else rows
        self._has_more = True
        self._stack = ExitStack()
        self._resource = self._stack.enter_context(batch.context.resource.lent())
        self.are_over = False

    @property
    def waiting(self) -> int:
        """The number of rows that wait for a free handler slot."""
        batch = self._batch
        left = len(batch.rows) - len(batch.started) + len(self._again)
        return left if self._has_more else 0

    def go_on(self) -> None:
        """Settle the rows whose handlers have ended, and start as many others as there is room."""
        self._settle_ended()
        while self._has_more and self._loop.free:
            found = next(self._given, None)
            if found is None:
                self._has_more = False
                break
            pk, given = found
            is_taken_over = self._prepares and self._marked.is_taken_over(pk)
            if self._together:
                self._note_call(pk, given)
            else:
                self._batch.started.add(pk)
            self._in_flight.add(pk)
            arguments = self._resource.arguments
            self._loop.start(
                self._batch.processor, pk, given, arguments, is_taken_over=is_taken_over
            )
        if not (self._has_more or self._in_flight):
            for pk, outcome in self._refused:
                settle(self._batch, pk, outcome)
            self.are_over = True

    def _note_call(self, pk: Any, rows: Mapping[Any, M]) -> None:
        self._batch.context.in_flight.note([*self._loop.rows_under_way, *rows])
        self._calls[pk] = rows
        self._again.difference_update(rows)
        self._batch.started.update(rows)

    def _settle_ended(self) -> None:
        batch, loop, marked = self._batch, self._loop, self._marked
        while ended := loop.ended(self._in_flight):
            # Recorded here before the loop forgets them, because an interrupt may come in between.
            outcomes, again = self._by_row(ended)
            marked.ended.update(outcomes)
            loop.forget(ended)
            self._in_flight.difference_update(ended)
            self._resource.is_worn |= any(isinstance(each, Failed) for each in outcomes.values())
            settle_ended(batch)
            if again:
                self._call_again(again)

    def _by_row(self, ended: Mapping[Any, Any]) -> tuple[Mapping[Any, Outcome], list[Any]]:
        """Return the outcomes of rows from those of handlers, and the rows to be called again."""
        if not self._together:
            return ended, []
        by_row: dict[Any, Outcome] = {}
        again: list[Any] = []
        for pk, each in ended.items():
            outcomes, alone = outcomes_and_again(self._marked, self._calls[pk], each)
            by_row.update(outcomes)
            again += alone
        return by_row, again

    def _call_again(self, again: list[Any]) -> None:
        """Go on with the rows of a call that raised; if they may not start, they are put back."""
        context = self._batch.context
        self._resource.is_worn = True
        if not context.resource.ready():
            return
        self._resource = self._stack.enter_context(context.resource.lent())
        rows = self._startable(again)
        self._given, self._has_more = ((pk, {pk: row}) for pk, row in rows), True
        self._again.update(again)

    def close(self) -> None:
        """Cancel the handlers that are in flight; those that end all the same are to be settled."""
        with self._stack:
            # Before the resource that they use is closed, and before the other rows are put back.
            if self._in_flight:
                outcomes, _ = self._by_row(self._loop.cancel(self._in_flight))
                self._marked.ended.update(outcomes)
                self._in_flight.clear()


def _all_at_once(rows: Iterator[tuple[Any, M]]) -> Iterator[tuple[Any, Mapping[Any, M]]]:
    """Yield one call for all of the rows, with the key of its first one."""
    given = dict(rows)
    if given:
        yield next(iter(given)), given
