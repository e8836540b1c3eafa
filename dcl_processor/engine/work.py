"""Call the handlers inside the transaction that has the rows' locks, and keep their work apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcl_processor.candidates.question import Question
from dcl_processor.database.contention import was_ended_by_server
from dcl_processor.definition.kinds import rules_of
from dcl_processor.exceptions import AttemptsUsedUp, TransactionLost
from dcl_processor.execution.handler import Failed, Handled, execute, execute_together

from .settlement import Batch, Held, column

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

    from .lane import Lane


def handle_locked(lane: Lane, batch: Batch) -> None:
    """Handle the claimed rows one by one, so that the failure of one does not undo the others."""
    assert batch.claimed is not None
    rows = batch.claimed.rows
    several = len(rows) > 1
    shared = several or lane.run.notes_failures
    with lane.watched:
        if several and lane.processor._handles_batches:
            _handle_together(lane, batch)
            return
        try:
            for place, held in enumerate(rows):
                if not lane.run.may_start(batch.ended, lane.resource):
                    batch.ended += [(each, None) for each in rows[place:]]
                    break
                if place:
                    lane.session.check_before_next()
                if held.refused is not None:
                    batch.ended.append((held, held.refused))
                    continue
                lane.in_flight.note([held.pk])
                _handle(lane, batch, held, shared=shared)
        finally:
            lane.savepoint.end()


def _handle(lane: Lane, batch: Batch, held: Held, *, shared: bool) -> None:
    """Handle a row; ``shared``: other rows' work, or a note about it, must survive its failure."""
    batch.started.append(held)
    lane.savepoint.begin()
    outcome = execute(
        lane.processor,
        held.row,
        lane.resource.arguments,
        limit=lane.run.time_limit,
        attempt=held.attempt if lane.counts_attempts else None,
    )
    # Recorded before its work is kept, because an error from here on is this row's failure.
    batch.ended.append((held, outcome))
    try:
        # After each row, so that this row is the one that ended the transaction.
        lane.session.check()
        batch.ended[-1] = held, lane.savepoint.close(outcome, alone=not shared)
    except TransactionLost as error:
        batch.to_blame = None if was_ended_by_server(error) else held
        raise
    if type(outcome) is Failed:
        lane.resource.reopen_later()


def _handle_together(lane: Lane, batch: Batch) -> None:
    """Call ``process_batch()``; raises if nothing of the batch can be kept."""
    rows = [held for held in batch.rows if held.refused is None]
    batch.ended += [(held, held.refused) for held in batch.rows if held.refused is not None]
    if not rows:
        return
    batch.started += rows
    lane.in_flight.note([held.pk for held in rows])
    try:
        given = {held.pk: held.row for held in rows}
        arguments, limit = lane.resource.arguments, lane.run.time_limit
        lane.savepoint.begin()
        outcomes = execute_together(lane.processor, given, arguments, limit)
        lane.session.check()
        kept = lane.savepoint.close(Handled(), alone=True)
    except BaseException:
        # The rows are about to be redone, and the open resource may have caused the failure.
        lane.resource.reopen_later()
        raise
    finally:
        lane.savepoint.end()
    if type(kept) is Failed:
        raise kept.error  # the handler asked for a rollback
    batch.ended += [(held, outcomes[held.pk]) for held in rows]
    if Failed in map(type, outcomes.values()):
        lane.resource.reopen_later()


def read_attempts(processor: Definition[Any], question: Question[Any], rows: list[Held]) -> None:
    """Note of each row how often it was tried, before a handler can change the instances.

    A row that has no attempts left gets an outcome.
    """
    retry = processor.retry
    if retry is None or not rows:
        return
    tried = _before(rows, retry.attempts) or column(question, rows, retry.attempts)
    # The outcome of the last attempt was recorded with the row's lock, or with the lease's end.
    in_transaction, lease = rules_of(processor).in_transaction, processor.lease
    leases = _before(rows, lease.field) if lease is not None else {}
    for held in rows:
        held.attempt = (tried.get(held.pk) or 0) + 1  # NULL counts as 0
        held.most = most = retry.max_attempts
        if held.refused is None and most is not None and held.attempt > most:
            # It was tried so often, and could not be given up: its handler is not called again.
            is_known = in_transaction or (held.pk in leases and leases[held.pk] is None)
            held.refused = Failed(AttemptsUsedUp(most, is_known=is_known))


def _before(rows: list[Held], name: str) -> dict[Any, Any]:
    """Return a column's values before the claim, if the claim has written to it."""
    marked = [(held.pk, held.marked.before) for held in rows if held.has_mark]
    return {pk: before[name] for pk, before in marked if name in before}
