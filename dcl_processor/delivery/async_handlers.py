"""The asynchronous handlers of one batch, which share an event loop with those of others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from django.db.models import Model

from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.handler import Failed, Outcome, Prepared

from .batch import Batch
from .settle import settle, settle_ended
from .together import Startable, after_preparation, left_by_others, outcomes_and_again

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
        #: Rows whose ``taken_over()`` is under way before the call of ``process_batch()``, and
        #: those for which it has returned.
        self._preparing: set[Any] = set()
        self._prepared: set[Any] = set()
        self._given: Iterator[tuple[Any, Any] | None]
        self._given = self._one_call() if self._together else startable(batch.rows)
        self._has_more = True
        self._stack = ExitStack()
        self._resource = self._stack.enter_context(batch.context.resource.borrowed())
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
        while self._has_more and self._loop.free and (found := self._next()) is not None:
            self._start(*found)
        if not (self._has_more or self._in_flight):
            for pk, outcome in self._refused:
                settle(self._batch, pk, outcome)
            self.are_over = True

    def _next(self) -> tuple[Any, Any] | None:
        """Return what to start next, with its row's key; ``None``: nothing now, or nothing more."""
        for found in self._given:
            return found
        self._has_more = False
        return None

    def _start(self, pk: Any, given: Any) -> None:
        if self._together:
            is_taken_over = pk in self._preparing
            self._note_call(pk, given, is_taken_over=is_taken_over)
        else:
            is_taken_over = self._prepares and self._marked.is_taken_over(pk)
            self._batch.started.add(pk)
            self._note([pk])
        self._in_flight.add(pk)
        processor, arguments = self._batch.processor, self._resource.arguments
        still_ours = partial(self._batch.is_ours, pk) if is_taken_over else None
        attempt = None if self._together else self._batch.attempts.get(pk)
        self._loop.start(processor, pk, given, arguments, still_ours=still_ours, attempt=attempt)

    def _one_call(self) -> Iterator[tuple[Any, Mapping[Any, M]] | None]:
        """Yield one call for all of the rows, after a mapping of one row for each ``taken_over()``.

        Yields ``None`` while these are under way.
        """
        rows: Mapping[Any, M] = dict(self._startable(self._batch.rows))
        left = left_by_others(self._batch, rows)
        for pk, row in self._startable(left):
            self._preparing.add(pk)
            yield pk, {pk: row}
        while self._preparing:
            yield None
        if left:
            rows = after_preparation(self._startable, rows, left, self._prepared)
        if rows:
            yield next(iter(rows)), rows

    def _note_call(self, pk: Any, rows: Mapping[Any, M], *, is_taken_over: bool) -> None:
        self._note(rows)
        self._calls[pk] = rows
        if not is_taken_over:
            self._again.difference_update(rows)
            self._batch.started.update(rows)

    def _note(self, rows: Iterable[Any]) -> None:
        in_flight = self._batch.context.in_flight
        if in_flight.notes.using is not None:
            in_flight.note([*self._loop.rows_under_way, *rows])

    def _settle_ended(self) -> None:
        batch, loop, marked = self._batch, self._loop, self._marked
        while ended := loop.ended(self._in_flight):
            # Recorded here before the loop forgets them, because an interrupt may come in between.
            outcomes, again = self._by_row(ended)
            marked.ended.update(outcomes)
            loop.forget(ended)
            self._in_flight.difference_update(ended)
            self._resource.must_reopen |= any(
                isinstance(each, Failed) for each in outcomes.values()
            )
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
            self._preparing.discard(pk)
            # Race: flip without work. By the outcome itself: after an interrupt the loop may return
            # it a second time, and it must not be taken for that of the call.
            if isinstance(each, Prepared):
                self._prepared.add(pk)
                continue
            outcomes, alone = outcomes_and_again(self._batch, self._marked, self._calls[pk], each)
            by_row.update(outcomes)
            again += alone
        return by_row, again

    def _call_again(self, again: list[Any]) -> None:
        """Go on with the rows of a call that raised; if they may not start, they are put back."""
        context = self._batch.context
        self._resource.must_reopen = True
        if not context.resource.ready():
            return
        self._resource = self._stack.enter_context(context.resource.borrowed())
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
