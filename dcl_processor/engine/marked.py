"""Call the handlers while no transaction is open: the rows' marks keep other workers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dcl_processor import log_fields
from dcl_processor.database.connection import is_connected
from dcl_processor.errors import represent
from dcl_processor.exceptions import TransactionLeftOpen
from dcl_processor.execution.handler import (
    Failed,
    Lost,
    Outcome,
    Together,
    attempt_together,
    execute,
    not_prepared,
    prepare,
)
from dcl_processor.masking import shown

from .recovery import log_redone
from .settlement import Batch, Held
from .settling import settle_ended, settle_row

if TYPE_CHECKING:
    from .lane import Lane


def handle_marked(lane: Lane, batch: Batch) -> None:
    """Handle the claimed rows; each but the last is settled before the next handler is called.

    Asynchronous handlers are started when the batch goes on.
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


# --- ``process_batch()``


def _handle_together(lane: Lane, batch: Batch) -> None:
    """Call the handler with all rows that may start, after ``taken_over()`` with some of them.

    Rows that are to be called again, and may not start any more, are put back.
    """
    rows = _prepared(lane, batch, startable(lane, batch, batch.rows))
    again = _call_together(lane, batch, rows) if rows else ()
    # The open resource may have caused the failure.
    for held in again if again and lane.resource.ready() else ():
        if startable(lane, batch, [held]):
            _call_together(lane, batch, [held])
    put_back(batch, batch.rows)


def _prepared(lane: Lane, batch: Batch, rows: Sequence[Held]) -> Sequence[Held]:
    """Call ``taken_over()`` with the rows of other workers; return the rows for the handler."""
    if not lane.processor._prepares_taken_over:
        return rows
    left = [held for held in rows if is_left_by_another(lane, held)]
    if not left:
        return rows
    waiting = list(left)
    for held in left:
        if not startable(lane, batch, [held]):
            continue
        lane.in_flight.note([held.pk])
        with lane.watched as leftover:
            refused = prepare(lane.processor, held.row, lane.run.time_limit)
        if leftover.end() and refused is None:
            refused = not_prepared(TransactionLeftOpen())
        if refused is None:
            waiting.remove(held)
        else:
            batch.ended.append((held, refused))
            settle_row(lane, batch, len(batch.ended) - 1)
    # Race: double claim. A lease may have lapsed during these calls.
    return startable(lane, batch, [held for held in rows if held not in waiting])


def _call_together(lane: Lane, batch: Batch, rows: Sequence[Held]) -> Sequence[Held]:
    """Call the handler and settle its rows; return those that are to be called again."""
    lane.in_flight.note([held.pk for held in rows])
    arguments, given = lane.resource.arguments, {held.pk: held.row for held in rows}
    with lane.watched as leftover:
        # As late as possible, because AT_MOST_ONCE does not put a started row back.
        batch.started += rows
        ended = attempt_together(lane.processor, given, arguments, lane.run.time_limit)
        again = is_to_be_redone(batch, rows, ended)
        outcomes = dict.fromkeys(given, ended) if not isinstance(ended, dict) else ended
        if not again:
            # Race: work without flip. As above.
            batch.ended += [(held, outcomes[held.pk]) for held in rows]
    if again:
        tell_of_redone(lane, rows, ended)
        lane.resource.reopen_later()
        leftover.end()
        return rows
    outcomes = leftover.judge_all(outcomes)
    batch.ended[-len(rows) :] = [(held, outcomes[held.pk]) for held in rows]
    if Failed in map(type, outcomes.values()):
        lane.resource.reopen_later()
    settle_ended(lane, batch)
    return ()


def is_to_be_redone(batch: Batch, rows: Sequence[Held], ended: Together) -> bool:
    """Return whether each row is to be handled alone.

    If the call raised, it is unknown which of its rows caused the error, and which of them were
    handled before it.
    """
    # Race: poison row. Each row is called alone, so that one fails and the others are done. Only a
    # delivery that may repeat work allows that.
    assert batch.mark is not None
    return batch.mark.is_lease and len(rows) > 1 and not isinstance(ended, dict)


def tell_of_redone(lane: Lane, rows: Sequence[Held], ended: Any) -> None:
    """Log the error of a call: it is in no report if the run stops before the rows are alone."""
    lane.run.counters.counts["redone"] += len(rows)
    if not isinstance(ended, Failed):
        return
    name = lane.processor.name
    log_redone(
        ended.error,
        "%s: a call of process_batch() for %d rows raised, and each row is to be handled alone: %s",
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
