"""Call the handlers inside the transaction that has the rows' locks, and keep their work apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcl_processor.candidates.question import Question
from dcl_processor.database.contention import was_ended_by_server
from dcl_processor.definition.kinds import rules_of
from dcl_processor.exceptions import AttemptsUsedUp, InvalidOption, TransactionLost
from dcl_processor.execution.handler import (
    Failed,
    Handled,
    Outcome,
    UsedUp,
    execute,
    execute_together,
)

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
    """Note of each row how often it was tried, and how often it may be.

    Before a handler can change the instances. A row whose limit is not known, or that has no
    attempts left, gets an outcome.
    """
    retry = processor.retry
    if retry is None or not rows:
        return
    tried, limits, most = dict[Any, Any](), dict[Any, Any](), retry.max_attempts
    if retry.attempts is not None:
        tried = _before(rows, retry.attempts) or column(question, rows, retry.attempts)
    if isinstance(most, str):
        limits = column(question, rows, most)
    # The outcome of the last attempt was recorded with the row's lock, or with the lease's end.
    in_transaction, lease = rules_of(processor).in_transaction, processor.lease
    leases = _before(rows, lease.field) if lease is not None else {}
    for held in rows:
        held.attempt = (tried.get(held.pk) or 0) + 1  # NULL counts as 0
        unlimited = None
        if callable(most):
            unlimited = _limited(processor, held)
        else:
            held.most = limits.get(held.pk) if isinstance(most, str) else most
        held.refused = held.refused or unlimited
        bounded = held.most is not None and (retry.bounds_attempts or not in_transaction)
        if held.refused is None and bounded and held.attempt > (held.most or 0):
            # It was tried so often, and could not be given up: its handler is not called again.
            is_known = in_transaction or (held.pk in leases and leases[held.pk] is None)
            held.refused = Failed(AttemptsUsedUp(held.most or 0, is_known=is_known))


def _before(rows: list[Held], name: str) -> dict[Any, Any]:
    """Return a column's values before the claim, if the claim has written to it."""
    marked = [(held.pk, held.marked.before) for held in rows if held.has_mark]
    return {pk: before[name] for pk, before in marked if name in before}


def _limited(processor: Definition[Any], held: Held) -> Outcome | None:
    """Ask the function for the row's limit; return the row's outcome if it may not be handled."""
    assert processor.retry is not None
    try:
        held.most = processor.retry.limit(held.row)
    except InvalidOption as error:
        named = InvalidOption(f"{processor.name}: {error}")
        named.__cause__ = error.__cause__
        return Failed(named, unstarted=True)
    # With a dead letter, the row is claimed to write it.
    is_used_up = held.most is not None and held.attempt > held.most and not processor.failed
    return UsedUp() if is_used_up and not _ended_with_its_worker(processor, held) else None


def _ended_with_its_worker(processor: Definition[Any], held: Held) -> bool:
    """Return whether the row's last attempt left its lease behind, and a dead letter is due."""
    lease = processor.lease
    if lease is None or not processor._has_dead_letter or not held.has_mark:
        return False
    return held.marked.before[lease.field] is not None
