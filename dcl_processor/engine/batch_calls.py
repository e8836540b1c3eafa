"""The calls for one batch that are made one after another, or at once on the run's event loop.

They are those of asynchronous handlers, and of ``process_batch()``. The batch stays open in the
lane until the last of them has ended. Meanwhile a lane with an event loop claims more rows:
otherwise a batch would last as long as its slowest handler, and the others would have nothing to
do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from dcl_processor import log_fields
from dcl_processor.errors import represent
from dcl_processor.exceptions import TransactionLeftOpen
from dcl_processor.execution.handler import (
    Failed,
    Outcome,
    Prepared,
    Together,
    attempt_together,
    not_prepared,
    prepare,
)
from dcl_processor.masking import shown

from .marked import is_left_by_another, put_back, startable
from .recovery import log_redone
from .settlement import Batch, Held
from .settling import settle_ended

if TYPE_CHECKING:
    from dcl_processor.execution.event_loop import EventLoop
    from dcl_processor.execution.resource import OpenResource

    from .lane import Lane

#: The part of the handlers' places that must be free before more rows are claimed, because rows
#: claimed one by one would cost a transaction each.
WORTH_CLAIMING = 1 / 4

#: Seconds after which fewer free places are filled, too, if no other handler has ended.
LINGER = 0.02


class InPlace:
    """Makes the calls of a plain ``process_batch()``, each at once, in the thread of its lane."""

    rows_under_way: Sequence[Any] = ()

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        #: Whether there is room for a call, as for the event loop's.
        self.free = True
        self._ended: dict[Any, Together | Prepared] = {}

    def start(
        self,
        processor: Any,
        pk: Any,
        given: Mapping[Any, Any],
        arguments: tuple[Any, ...],
        *,
        still_ours: Callable[[], bool] | None = None,
        attempt: int | None = None,  # noqa: ARG002  # rows that are handled together have none
    ) -> None:
        """Call ``taken_over()`` if ``still_ours`` is given, and otherwise ``process_batch()``."""
        self.free, limit = False, self._lane.run.time_limit
        with self._lane.watched as leftover:
            # Race: work without flip. It is done; after an interrupt its rows are settled by this.
            if still_ours is None:
                self._ended[pk] = attempt_together(processor, given, arguments, limit)
            else:
                self._ended[pk] = prepare(processor, given[pk], limit) or Prepared()
        ended = self._ended[pk]
        if isinstance(ended, dict):
            self._ended[pk] = leftover.judge_all(ended)
        elif leftover.end() and isinstance(ended, Prepared):
            self._ended[pk] = not_prepared(TransactionLeftOpen())

    def ended(self, pks: Iterable[Any]) -> dict[Any, Together | Prepared]:
        """Return what the call came to, until it is forgotten."""
        return {pk: self._ended[pk] for pk in pks if pk in self._ended}

    def forget(self, pks: Iterable[Any]) -> None:  # noqa: ARG002  # there is one
        """Forget the call, which was recorded, so that there is room for another one."""
        self._ended, self.free = {}, True

    cancel = ended


class BatchCalls:
    """Makes the calls for a batch as there is room for them, and settles the rows that ended.

    A handler gets one row, or with ``process_batch()`` all rows that may start, after
    ``taken_over()`` was called with some of them.
    """

    def __init__(self, lane: Lane, batch: Batch) -> None:
        self._lane, self._batch = lane, batch
        self._is_beside = lane.run.event_loop is not None
        self._loop: EventLoop | InPlace = lane.run.event_loop or InPlace(lane)
        self._together = lane.processor._handles_batches
        # Race: two of one key. The rows of a call that raised are called one by one.
        self._one_by_one = bool(self._together and batch.wanted.keys)
        self._stack = ExitStack()
        #: What handlers on the event loop share with those of other batches.
        self._resource: OpenResource | None = None
        self._borrow()
        #: The rows that are called one at a time; with ``process_batch()``, ``taken_over()`` is.
        self._single = deque(batch.rows)
        #: The rows of ``process_batch()``, until ``taken_over()`` has returned for some of them.
        self._rows: Sequence[Held] = ()
        #: The rows for which it has raised, so that it is called for each of them.
        self._alone: deque[Held] = deque()
        #: The rows of the calls under way, by the key of the first one.
        self._under_way: dict[Any, Sequence[Held]] = {}
        if self._together:
            self._rows = startable(lane, batch, batch.rows)
            put_back(batch, _others(batch.rows, self._rows))
            prepares = lane.processor._prepares_taken_over
            self._single = deque(
                [held for held in self._rows if prepares and is_left_by_another(lane, held)]
            )

    def _borrow(self) -> None:
        if self._is_beside:
            self._resource = self._stack.enter_context(self._lane.resource.borrowed())

    @property
    def wait(self) -> bool:
        """Whether rows wait for a free place."""
        may_be_called = not (self._one_by_one and self._under_way)
        return bool(self._single or self._rows or (self._alone and may_be_called))

    def go_on(self) -> bool:
        """Settle the rows whose handlers have ended, and start others; return whether all ended."""
        self._settle_ended()
        while self._loop.free and (rows := self._next()):
            self._start_next(rows)
            if not self._is_beside:
                self._settle_ended()
        if self._single or self._rows or self._alone or self._under_way:
            return False
        self._stack.close()
        return True

    def _next(self) -> Sequence[Held]:
        """Return the rows of the next call, if one may be made now."""
        if self._single:
            return [self._single.popleft()]
        if self._under_way and (self._rows or self._one_by_one):
            return ()
        ended = {held.pk for held, _ in self._batch.ended}
        rows, self._rows = [held for held in self._rows if held.pk not in ended], ()
        return rows or ([self._alone.popleft()] if self._alone else ())

    def _start_next(self, rows: Sequence[Held]) -> None:
        # Race: double claim. A lease may have lapsed during ``taken_over()``.
        free = startable(self._lane, self._batch, rows)
        if free:
            self._start(free)
        # The refused ones have their outcomes. If no row may start any more, each call finds that.
        put_back(self._batch, _others(rows, free))

    def _start(self, rows: Sequence[Held]) -> None:
        lane, [first, *_] = self._lane, rows
        processor, retry = lane.processor, lane.processor.retry
        # Of ``process_batch()`` the rows are called together, or again, when these have ended.
        only_prepares = self._together and bool(self._rows)
        is_taken_over = only_prepares
        if not self._together and processor._prepares_taken_over:
            is_taken_over = is_left_by_another(lane, first)
        if lane.in_flight.notes.using is not None:
            lane.in_flight.note([*self._loop.rows_under_way, *[held.pk for held in rows]])
        if not only_prepares:
            self._batch.started += rows
        self._under_way[first.pk] = rows
        counts = not self._together and retry is not None and retry.attempts is not None
        self._loop.start(
            processor,
            first.pk,
            {held.pk: held.row for held in rows} if self._together else first.row,
            (self._resource or lane.resource).arguments,
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
            rows = self._under_way[pk]
            # Race: flip without work. By the outcome itself: after an interrupt the loop may return
            # it a second time, and it must not be taken for that of the call.
            if isinstance(each, Prepared):
                continue
            if self._together and self._is_to_be_redone(rows, each):
                self._tell_of_redone(rows, each)
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
        # The open resource may have caused the failure.
        if self._lane.resource.ready():
            self._borrow()
            self._alone.extend(again)
        else:
            put_back(self._batch, again)

    def _is_to_be_redone(self, rows: Sequence[Held], ended: Together) -> bool:
        """Return whether each row is to be handled alone.

        If the call raised, it is unknown which of its rows caused the error, and which of them were
        handled before it.
        """
        # Race: poison row. Each row is called alone, so that one fails and the others are done.
        # Only a delivery that may repeat work allows that.
        assert self._batch.mark is not None
        return self._batch.mark.is_lease and len(rows) > 1 and not isinstance(ended, dict)

    def _tell_of_redone(self, rows: Sequence[Held], ended: Any) -> None:
        """Log the error of a call: it is in no report if the run stops before rows are alone."""
        self._lane.run.counters.counts["redone"] += len(rows)
        if not isinstance(ended, Failed):
            return
        name = self._lane.processor.name
        log_redone(
            ended.error,
            "%s: a call of process_batch() for %d rows raised, and each row is to be handled "
            "alone: %s",
            name,
            len(rows),
            shown(represent(ended.error)),
            extra=log_fields.fields(
                name,
                row_count=len(rows),
                duration=ended.duration,
                **log_fields.error_fields(ended.error),
            ),
        )

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
