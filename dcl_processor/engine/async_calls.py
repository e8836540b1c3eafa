"""The asynchronous handlers of one batch, which share the run's event loop with those of others.

Its batch stays open in the lane until the last of them has ended. Meanwhile the lane claims more
rows: otherwise a batch would last as long as its slowest handler, and the others would have nothing
to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from dcl_processor.execution.handler import Failed, Outcome, Prepared, Together

from .marked import is_left_by_another, is_to_be_redone, put_back, startable, tell_of_redone
from .settlement import Batch, Held
from .settling import settle_ended

if TYPE_CHECKING:
    from .lane import Lane

#: The part of the handlers' places that must be free before more rows are claimed, because rows
#: claimed one by one would cost a transaction each.
WORTH_CLAIMING = 1 / 4

#: Seconds after which fewer free places are filled, too, if no other handler has ended.
LINGER = 0.02


class AsyncCalls:
    """Starts the handlers of a batch as the event loop has room, and settles those that ended.

    A handler gets one row, or with ``process_batch()`` all rows that may start, after
    ``taken_over()`` was called with some of them.
    """

    def __init__(self, lane: Lane, batch: Batch) -> None:
        assert lane.run.event_loop is not None
        self._lane, self._batch, self._loop = lane, batch, lane.run.event_loop
        self._together = lane.processor._handles_batches
        self._stack = ExitStack()
        self._resource = self._stack.enter_context(lane.resource.borrowed())
        #: The rows of the calls to come, and whether only ``taken_over()`` is called.
        self._waiting: deque[tuple[Sequence[Held], bool]] = deque()
        #: Those of the calls under way, by the key of the first row.
        self._under_way: dict[Any, tuple[Sequence[Held], bool]] = {}
        #: The rows of ``process_batch()``, until ``taken_over()`` has returned for some of them.
        self._rows: Sequence[Held] = ()
        if self._together:
            self._rows = startable(lane, batch, batch.rows)
            put_back(batch, _others(batch.rows, self._rows))
            if lane.processor._prepares_taken_over:
                left = [held for held in self._rows if is_left_by_another(lane, held)]
                self._waiting.extend(([held], True) for held in left)
        else:
            self._waiting.extend(([held], False) for held in batch.rows)

    @property
    def wait(self) -> bool:
        """Whether rows wait for a free place."""
        return bool(self._waiting or self._rows) and not self._waits_for_its_key

    @property
    def _waits_for_its_key(self) -> bool:
        """Whether the next row is to be called alone, while another one of its key is at work."""
        # Race: two of one key. The rows of a call that raised are called one by one.
        is_keyed = self._together and bool(self._batch.wanted.keys)
        only_prepares = bool(self._waiting) and self._waiting[0][1]
        return is_keyed and bool(self._waiting and self._under_way) and not only_prepares

    def go_on(self) -> bool:
        """Settle the rows whose handlers have ended, and start others; return whether all ended."""
        self._settle_ended()
        while self._loop.free and self._has_more():
            rows, only_prepares = self._waiting.popleft()
            self._start_next(rows, only_prepares=only_prepares)
        if self._waiting or self._under_way or self._rows:
            return False
        settle_ended(self._lane, self._batch)  # those that were refused, or put back
        self._stack.close()
        return True

    def _has_more(self) -> bool:
        """Return whether there is a call to make now."""
        if self._rows and not (self._waiting or self._under_way):
            ended = {held.pk for held, _ in self._batch.ended}
            # Race: double claim. A lease may have lapsed during ``taken_over()``.
            rows, self._rows = [held for held in self._rows if held.pk not in ended], ()
            if rows:
                self._waiting.append((rows, False))
        return bool(self._waiting) and not self._waits_for_its_key

    def _start_next(self, rows: Sequence[Held], *, only_prepares: bool) -> None:
        free = startable(self._lane, self._batch, rows)
        if free:
            self._start(free, only_prepares=only_prepares)
        # The refused ones have their outcomes. If no row may start any more, each call finds that.
        put_back(self._batch, _others(rows, free))

    def _start(self, rows: Sequence[Held], *, only_prepares: bool) -> None:
        lane, [first, *_] = self._lane, rows
        processor, retry = lane.processor, lane.processor.retry
        is_taken_over = only_prepares
        if not self._together and processor._prepares_taken_over:
            is_taken_over = is_left_by_another(lane, first)
        if lane.in_flight.notes.using is not None:
            lane.in_flight.note([*self._loop.rows_under_way, *[held.pk for held in rows]])
        if not only_prepares:
            self._batch.started += rows
        self._under_way[first.pk] = rows, only_prepares
        counts = not self._together and retry is not None and retry.attempts is not None
        self._loop.start(
            processor,
            first.pk,
            {held.pk: held.row for held in rows} if self._together else first.row,
            self._resource.arguments,
            still_ours=partial(lane.is_ours, first.pk) if is_taken_over else None,
            attempt=first.attempt if counts else None,
        )

    def _settle_ended(self) -> None:
        while ended := self._loop.ended(self._under_way):
            # Recorded here before the loop forgets them, because an interrupt may come in between.
            again = self._record(ended)
            self._loop.forget(ended)
            for pk in ended:
                del self._under_way[pk]
            settle_ended(self._lane, self._batch)
            if again:
                self._call_again(again)

    def _record(
        self, ended: Mapping[Any, Together | Prepared], known: Collection[Any] = ()
    ) -> list[Held]:
        """Record the outcomes of calls, and return the rows that are to be called again.

        ``known``: the rows whose outcome is recorded already.
        """
        again: list[Held] = []
        for pk, each in ended.items():
            rows, _ = self._under_way[pk]
            # Race: flip without work. By the outcome itself: after an interrupt the loop may return
            # it a second time, and it must not be taken for that of the call.
            if isinstance(each, Prepared):
                continue
            if self._together and is_to_be_redone(self._batch, rows, each):
                tell_of_redone(self._lane, rows, each)
                again += rows
                continue
            outcomes: Mapping[Any, Outcome]
            outcomes = each if isinstance(each, dict) else dict.fromkeys([h.pk for h in rows], each)
            self._batch.ended += [(held, outcomes[held.pk]) for held in rows if pk not in known]
            if again or Failed in map(type, outcomes.values()):
                self._lane.resource.reopen_later(self._resource)
        return again

    def _call_again(self, again: Iterable[Held]) -> None:
        """Go on with the rows of a call that raised; if they may not start, they are put back."""
        self._lane.resource.reopen_later(self._resource)
        if self._lane.resource.ready():
            self._resource = self._stack.enter_context(self._lane.resource.borrowed())
            self._waiting.extend(([held], False) for held in again)
        else:
            put_back(self._batch, again)

    def close(self) -> None:
        """Cancel the handlers that are under way; those that end all the same are recorded."""
        with self._stack:
            # Before the resource that they use is closed, and before the other rows are put back.
            if self._under_way:
                known = {held.pk for held, _ in self._batch.ended}
                self._record(self._loop.cancel(self._under_way), known)
                self._under_way.clear()


def _others(rows: Sequence[Held], free: Sequence[Held]) -> list[Held]:
    """Return the rows that are not among the free ones."""
    if len(free) == len(rows):
        return []
    known = {held.pk for held in free}
    return [held for held in rows if held.pk not in known]
