"""Call the handlers while no transaction is open: the rows' marks keep other workers out.

A plain handler gets row after row, or with ``process_batch()`` all rows that may start.
Asynchronous handlers have ``BatchCalls``, whose batch stays open in the lane until the last of them
has ended. Meanwhile the lane claims more rows: otherwise a batch would last as long as its slowest
handler, and the others would have nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from dcl_processor import log_fields
from dcl_processor.database.connection import is_connected
from dcl_processor.errors import represent
from dcl_processor.execution.handler import Failed, Lost, Outcome, attempt_together, execute
from dcl_processor.execution.leftover import without_work
from dcl_processor.masking import shown

from .recovery import log_redone
from .settlement import Batch, Held
from .settling import settle_ended, settle_row

if TYPE_CHECKING:
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
    if lane.run.event_loop is not None:
        return
    if lane.processor._handles_batches:
        _handle_together(lane, batch)
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


def _handle_together(lane: Lane, batch: Batch) -> None:
    """Call ``process_batch()``, and again for each row alone if it has raised and may be repeated.

    It is unknown then which row caused the error, and which of them were handled before it.
    """
    rows = startable(lane, batch, batch.rows)
    # Race: poison row. Each row is called alone, so that one fails and the others are done.
    for held in _call_together(lane, batch, rows) if rows else ():
        # The open resource may have caused the failure.
        if not lane.resource.ready():
            break
        # Race: double claim. A lease may have lapsed in the call before.
        if startable(lane, batch, [held]):
            _call_together(lane, batch, [held])
            settle_row(lane, batch, len(batch.ended) - 1)
    # The refused ones have their outcomes. If no row may start any more, each call finds that.
    put_back(batch, batch.rows)


def _call_together(lane: Lane, batch: Batch, rows: Sequence[Held]) -> Sequence[Held]:
    """Call ``process_batch()`` with rows; return those that are to be called again."""
    processor, mark, first = lane.processor, batch.mark, len(batch.ended)
    assert mark is not None
    if lane.in_flight.notes.using is not None:
        lane.in_flight.note([held.pk for held in rows])
    batch.started += rows
    with lane.watched as leftover:
        given = {held.pk: held.row for held in rows}
        ended = attempt_together(processor, given, lane.resource.arguments, lane.run.time_limit)
        outcomes: Mapping[Any, Outcome] = {}
        if isinstance(ended, dict):
            outcomes = ended
        elif not mark.is_lease or len(rows) == 1:  # work may be repeated under a lease alone
            outcomes = dict.fromkeys([held.pk for held in rows], ended)
        # Race: work without flip. The work is done; after an interrupt the rows are settled by
        # this.
        batch.ended += [(held, outcomes[held.pk]) for held in rows if outcomes]
    if leftover.end():
        rolled_back = [(held, without_work(outcomes[held.pk])) for held, _ in batch.ended[first:]]
        batch.ended[first:] = rolled_back
    if outcomes:
        if Failed in map(type, outcomes.values()):
            lane.resource.reopen_later()
        return ()
    lane.resource.reopen_later()
    lane.run.counters.counts["redone"] += len(rows)
    if isinstance(ended, Failed):
        _tell_of_redone(processor.name, len(rows), ended)
    return rows


def _tell_of_redone(name: str, number: int, failed: Failed) -> None:
    """Log the error of a call: it is in no report if the run stops before rows are alone."""
    extra = log_fields.fields(
        name, row_count=number, duration=failed.duration, **log_fields.error_fields(failed.error)
    )
    message = (
        "%s: a call of process_batch() for %d rows raised, and each row is to be handled alone: %s"
    )
    error = shown(represent(failed.error))
    log_redone(failed.error, message, name, number, error, extra=extra)


def _call(lane: Lane, batch: Batch, held: Held) -> None:
    still_ours = None
    if lane.processor._prepares_taken_over and is_left_by_another(lane, held):
        still_ours = partial(lane.is_ours, held.pk)
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
            still_ours=still_ours,
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
    return lane.run.may_start(batch.ended, resource) and is_connected(lane.session.using)


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


def is_left_by_another(lane: Lane, held: Held) -> bool:
    """Return whether the row had a lease that lapsed, and that no worker has settled."""
    lease = lane.processor.lease
    return lease is not None and held.marked.before[lease.field] is not None


# --- the calls of asynchronous handlers for one batch, on the run's event loop


class BatchCalls:
    """Makes the calls for a batch as there is room for them, and settles the rows that ended."""

    def __init__(self, lane: Lane, batch: Batch) -> None:
        assert lane.run.event_loop is not None
        self._lane, self._batch, self._loop = lane, batch, lane.run.event_loop
        self._stack = ExitStack()
        #: What the handlers share with those of other batches.
        self._resource = self._stack.enter_context(lane.resource.borrowed())
        #: The rows that wait for their calls, and those of the calls under way, by their keys.
        self._rows = deque(batch.rows)
        self._under_way: dict[Any, Held] = {}

    @property
    def wait(self) -> bool:
        """Whether rows wait for a free place."""
        return bool(self._rows)

    def go_on(self) -> bool:
        """Settle the rows whose handlers have ended, and start others; return whether all ended."""
        self._settle_ended()
        while self._loop.free and self._rows:
            self._start(self._rows.popleft())
        if self._rows or self._under_way:
            return False
        self._stack.close()
        return True

    def _start(self, held: Held) -> None:
        lane, batch, loop = self._lane, self._batch, self._loop
        # Race: double claim. A lease may have lapsed while its row waited for its call.
        if not startable(lane, batch, [held]):
            put_back(batch, [held])
            return
        if lane.in_flight.notes.using is not None:
            lane.in_flight.note([*loop.rows_under_way, held.pk])
        batch.started.append(held)
        self._under_way[held.pk] = held
        is_taken_over = lane.processor._prepares_taken_over and is_left_by_another(lane, held)
        loop.start(
            lane.processor,
            held.row,
            held.pk,
            self._resource.arguments,
            still_ours=partial(lane.is_ours, held.pk) if is_taken_over else None,
            attempt=held.attempt if lane.counts_attempts else None,
        )

    def _settle_ended(self) -> None:
        while ended := self._loop.ended(self._under_way):
            # Recorded here before the loop forgets them, because an interrupt may come in between.
            self._record(ended)
            self._loop.forget(ended)
            for pk in ended:
                del self._under_way[pk]
            settle_ended(self._lane, self._batch)

    def _record(self, ended: Mapping[Any, Outcome], known: Collection[Any] = ()) -> None:
        """Record the outcomes of calls; ``known``: the rows whose outcome is recorded already."""
        self._batch.ended += [(self._under_way[pk], ended[pk]) for pk in ended if pk not in known]
        if Failed in map(type, ended.values()):
            self._lane.resource.reopen_later(self._resource)

    def close(self) -> None:
        """Cancel the handlers that are under way; those that end all the same are recorded."""
        with self._stack:
            # Before the resource that they use is closed, and before the other rows are put back.
            if self._under_way:
                known = {held.pk for held, _ in self._batch.ended}
                self._record(self._loop.cancel(self._under_way), known)
                self._under_way.clear()
