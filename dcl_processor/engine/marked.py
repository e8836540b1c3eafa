"""Call the handlers while no transaction is open: the rows' marks keep other workers out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from dcl_processor.database.connection import is_connected
from dcl_processor.execution.handler import Failed, Lost, Outcome, execute

from .settlement import Batch, Held
from .settling import settle_row

if TYPE_CHECKING:
    from .lane import Lane


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
