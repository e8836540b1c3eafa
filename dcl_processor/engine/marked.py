"""Call the handlers while no transaction is open: the rows' marks keep other workers out.

A plain handler gets row after row. Asynchronous handlers, and ``process_batch()``, have
``BatchCalls``, whose batch stays open in the lane until the last of them has ended. Meanwhile a
lane with an event loop claims more rows: otherwise a batch would last as long as its slowest
handler, and the others would have nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dcl_processor import log_fields
from dcl_processor.database.connection import has_come_back, is_connected
from dcl_processor.errors import represent
from dcl_processor.execution.handler import (
    Failed,
    Lost,
    Outcome,
    Together,
    attempt_together,
    execute,
)
from dcl_processor.masking import shown

from .recovery import log_redone
from .settlement import Batch, Held
from .settling import settle_ended, settle_row

if TYPE_CHECKING:
    from dcl_processor.execution.resource import OpenResource

    from .lane import Lane

#: The part of the handlers' places that must be free before more rows are claimed, because rows
#: claimed one by one would cost a transaction each.
WORTH_CLAIMING = 1 / 4

#: Seconds after which fewer free places are filled, too, if no other handler has ended.
LINGER = 0.02


def handle_marked(lane: Lane, batch: Batch) -> None:
    """Handle the claimed rows; each but the last is settled before the next handler is called.

    ``BatchCalls`` are made when the batch goes on.
    """
    if lane.calls_apart:
        return
    assert batch.claimed is not None
    rows = batch.claimed.rows
    for place, held in enumerate(rows):
        if not may_start(lane, batch):
            batch.ended += [(each, None) for each in rows[place:]]
            return
        refused = refusal(lane, held)
        if refused is None:
            _call(lane, batch, held)
        else:
            batch.ended.append((held, refused))
        if held is not rows[-1]:
            # A process that dies leaves as few rows as possible without a settlement.
            settle_row(lane, batch, len(batch.ended) - 1)


def _call(lane: Lane, batch: Batch, held: Held) -> None:
    arguments = lane.resource.arguments
    with lane.watched as leftover:
        # As late as possible, because AT_MOST_ONCE does not put a started row back.
        batch.started.append(held)
        if lane.in_flight.notes.using is not None:
            lane.in_flight.note([held.pk])
        outcome = execute(
            lane.processor,
            held.row,
            arguments,
            limit=lane.run.time_limit,
            attempt=held.attempt if lane.counts_attempts else None,
        )
        # Race: work without flip. The work is done; after an interrupt the row is settled by this.
        batch.ended.append((held, outcome))
    if leftover.may_be_left():
        batch.ended[-1] = held, leftover.judge(outcome)
    if type(batch.ended[-1][1]) is Failed:
        lane.resource.reopen_later()


# --- which rows may start


def may_start(lane: Lane, batch: Batch) -> bool:
    """Return whether one more handler of the batch may be called now."""
    # Handlers on the event loop share a resource, which is reopened between batches.
    resource = None if lane.run.event_loop is not None else lane.resource
    # A handler may have lost the session. The next handler must not begin with a dead connection,
    # and rows that cannot start are put back.
    if not lane.run.may_start(batch.ended, resource):
        return False
    using, is_open = lane.session.using, lane.session.connection.connection is not None
    # Another handler would be called for a row that cannot be settled.
    is_there = is_open and is_connected(using)
    lane.has_server = is_there or has_come_back(using, waits=lane.has_server)
    return lane.has_server


def refusal(lane: Lane, held: Held) -> Outcome | None:
    """Return the outcome of a row whose handler may not be called; ``None``: it may."""
    if held.refused is not None:
        return held.refused
    # Race: double claim. Another worker may handle a row whose lease has lapsed.
    heartbeat = lane.run.heartbeat
    return None if heartbeat is None or heartbeat.is_ours(held.pk) else Lost(called=False)


def startable(lane: Lane, batch: Batch, rows: Iterable[Held]) -> list[Held]:
    """Return the rows whose handler may start now; the refused ones get their outcomes."""
    free = []
    for held in rows:
        if not may_start(lane, batch):
            break
        refused = refusal(lane, held)
        if refused is None:
            free.append(held)
        else:
            batch.ended.append((held, refused))
    return free


def put_back(batch: Batch, rows: Iterable[Held]) -> None:
    """Let the rows without an outcome wait again: no handler is called for them any more."""
    ended = {held.pk for held, _ in batch.ended}
    batch.ended += [(held, None) for held in rows if held.pk not in ended]


# --- the calls for one batch, one after another, or at once on the run's event loop


class BatchCalls:
    """Makes the calls for a batch as there is room for them, and settles the rows that ended.

    An asynchronous handler gets one row. ``process_batch()`` gets all rows that may start, and is
    called at once, in the thread of its lane.
    """

    def __init__(self, lane: Lane, batch: Batch) -> None:
        self._lane, self._batch = lane, batch
        self._loop = lane.run.event_loop
        self._together = lane.processor._handles_batches
        self._stack = ExitStack()
        #: What handlers on the event loop share with those of other batches.
        self._resource: OpenResource | None = None
        if self._loop is not None:
            self._resource = self._stack.enter_context(lane.resource.borrowed())
        calls = [batch.rows] if self._together and batch.rows else [[each] for each in batch.rows]
        #: The rows of each call that is still to be made.
        self._calls = deque(calls)
        #: The rows of the calls under way, by the key of the first one.
        self._under_way: dict[Any, Sequence[Held]] = {}
        #: What a call in this thread came to, until it is recorded.
        self._ended_here: dict[Any, Together] = {}

    @property
    def wait(self) -> bool:
        """Whether rows wait for a free place."""
        return bool(self._calls)

    def go_on(self) -> bool:
        """Settle the rows whose handlers have ended, and start others; return whether all ended."""
        self._settle_ended()
        while (self._loop is None or self._loop.free) and self.wait:
            self._start_next(self._calls.popleft())
            if self._loop is None:
                self._settle_ended()
        if self._calls or self._under_way:
            return False
        self._stack.close()
        return True

    def _start_next(self, rows: Sequence[Held]) -> None:
        # Race: double claim. A lease may have lapsed while its row waited for its call.
        free = startable(self._lane, self._batch, rows)
        if free:
            self._start(free)
        # The refused ones have their outcomes. If no row may start any more, each call finds that.
        if len(free) < len(rows):
            called = {held.pk for held in free}
            put_back(self._batch, [held for held in rows if held.pk not in called])

    def _start(self, rows: Sequence[Held]) -> None:
        lane, loop, [first, *_] = self._lane, self._loop, rows
        processor = lane.processor
        if lane.in_flight.notes.using is not None:
            under_way = [] if loop is None else loop.rows_under_way
            lane.in_flight.note([*under_way, *[held.pk for held in rows]])
        self._batch.started += rows
        self._under_way[first.pk] = rows
        if loop is None:
            self._call_here(first.pk, {held.pk: held.row for held in rows})
            return
        loop.start(
            processor,
            first.pk,
            first.row,
            (self._resource or lane.resource).arguments,
            attempt=first.attempt if lane.counts_attempts else None,
        )

    def _call_here(self, pk: Any, given: Mapping[Any, Any]) -> None:
        lane, ended = self._lane, self._ended_here
        with lane.watched as leftover:
            # Race: work without flip. It is done; after an interrupt its rows are settled by this.
            ended[pk] = attempt_together(
                lane.processor, given, lane.resource.arguments, lane.run.time_limit
            )
        ended[pk] = leftover.judge(ended[pk])

    def _settle_ended(self) -> None:
        loop = self._loop
        while ended := loop.ended(self._under_way) if loop is not None else self._ended_here:
            # Recorded here before they are forgotten, because an interrupt may come in between.
            again = self._record(ended)
            for pk in [*ended]:
                del self._under_way[pk]
            if loop is None:
                self._ended_here = {}
            else:
                loop.forget(ended)
            settle_ended(self._lane, self._batch)
            if again:
                self._call_again(again)

    def _record(self, ended: Mapping[Any, Together], known: Collection[Any] = ()) -> list[Held]:
        """Record the outcomes of calls, and return the rows that are to be called again.

        ``known``: the rows whose outcome is recorded already.
        """
        again: list[Held] = []
        for pk, each in ended.items():
            rows = self._under_way[pk]
            # Race: poison row. It is unknown which row caused the error of a call, and which were
            # handled before it. Each is called alone, so that one fails and the others are done.
            if len(rows) > 1 and not isinstance(each, dict):
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
            self._calls.extend([held] for held in again)
        else:
            put_back(self._batch, again)

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
                loop = self._loop
                ended = self._ended_here if loop is None else loop.cancel(self._under_way)
                self._record(ended, known)
                self._under_way.clear()
