"""Call the handler and settle the rows inside the transaction that holds their locks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.database.contention import was_ended_by_server
from dcl_processor.exceptions import TransactionLost, UnseenWork
from dcl_processor.execution.handler import (
    Failed,
    Handled,
    Outcome,
    as_exception,
    execute,
    execute_together,
)
from dcl_processor.execution.row_savepoint import RowSavepoint
from dcl_processor.interrupts import ends_the_run
from dcl_processor.locking.transaction_guard import TransactionGuard
from dcl_processor.settlement import flip, grouping, writing
from dcl_processor.values import Values, resolve

from .batch import Batch

M = TypeVar("M", bound=Model)

#: Values, and the rows that they are written to.
Writes = list[tuple[Values, list[Any]]]


def handle(batch: Batch[M], guard: TransactionGuard) -> None:
    """Handle the rows, so that the failure of one does not undo the others."""
    context, processor = batch.context, batch.context.processor
    retry = processor.retry
    refused = batch.read_limits() if retry is not None and retry.limit_varies else {}
    connection, several = connections[batch.question.using], len(batch.rows) > 1
    if processor._handles_batches and several:
        _handle_together(batch, guard, refused)
        return
    shared = several or processor._notes_failures
    context.in_flight.note(batch.rows)
    for place, (pk, row) in enumerate(batch.rows.items()):
        if not context.may_start(batch.outcomes):
            break
        if pk in refused:
            batch.outcomes[pk] = refused[pk]
            continue
        batch.started.add(pk)
        if several:
            context.in_flight.narrow(place, pk)
        with RowSavepoint(connection, shared=shared) as savepoint:
            outcome = execute(
                processor,
                row,
                context.resource.arguments(),
                limit=context.time_limit,
                attempt=batch.attempts.get(pk),
            )
        # Recorded before its work is kept, because an error from here on is this row's failure.
        batch.outcomes[pk] = outcome
        try:
            guard.check()
            batch.outcomes[pk] = savepoint.close(outcome)
        except (TransactionLost, UnseenWork) as error:
            # Checked after each row, so that this row is the one that ended the transaction.
            batch.to_blame = None if was_ended_by_server(error) else pk
            raise
        if isinstance(outcome, Failed):
            context.resource.reopen_later()


def _handle_together(
    batch: Batch[M], guard: TransactionGuard, refused: Mapping[Any, Outcome]
) -> None:
    """Call ``process_batch()``; raises if nothing of the batch can be kept.

    ``refused``: the outcomes of rows that may not be handled, as only their claim showed.
    """
    context, resource = batch.context, batch.context.resource
    handled = {pk: row for pk, row in batch.rows.items() if pk not in refused}
    batch.outcomes.update(refused)
    if not handled:
        return
    batch.started.update(handled)
    context.in_flight.note(handled)
    try:
        with RowSavepoint(connections[batch.question.using], shared=False) as savepoint:
            arguments = resource.arguments()
            outcomes = execute_together(batch.processor, handled, arguments, context.time_limit)
        guard.check()
        kept = savepoint.close(Handled())
    except BaseException:
        # The rows are about to be redone, and the open resource may have caused the failure.
        resource.reopen_later()
        raise
    if isinstance(kept, Failed):
        raise kept.error  # the handler asked for a rollback
    batch.outcomes.update(outcomes)
    if any(isinstance(outcome, Failed) for outcome in outcomes.values()):
        resource.reopen_later()


def settle(batch: Batch[M], guard: TransactionGuard) -> None:
    """Flip the handled rows, and write the outcomes of the others.

    The flips may wait, and be sent with the COMMIT. Raises when a row cannot be settled; the
    transaction must then be rolled back.
    """
    # Race: flip without work. The work of a row whose handler raised was rolled back.
    handled = {pk: o.result for pk, o in batch.outcomes.items() if isinstance(o, Handled)}
    writes, notes = _flips(batch, handled), _notes(batch, handled)
    # Race: flip without work. If the transaction has ended, the lock and the work are lost, and the
    # next transaction would contain the flip alone. No user code runs between this and the flip.
    guard.close()
    all_handled = len(handled) == len(batch.rows)
    if all_handled and batch.context.trusts_flips and _wait(batch, writes, guard.transaction_id):
        return
    processor, question = batch.processor, batch.question
    # Django refuses queries in a transaction that is to be rolled back, and nothing of it is kept.
    is_kept = not connections[question.using].needs_rollback
    if guard.transaction_id is not None and is_kept and not any(v for v, _ in writes + notes):
        writing.refuse_another(question.using, guard.transaction_id)
    for values, pks in writes:
        writing.write(question, pks, values, processor, guard.transaction_id, is_flip=True)
    for values, pks in notes:
        writing.write(question, pks, values, processor, guard.transaction_id)
    # The flip could not be rehearsed beforehand, or its rehearsal on one row proves nothing for
    # the other rows.
    if handled and batch.context.needs_check("done"):
        writing.refuse_pending(processor, question, list(handled))
    if connections[question.using].run_on_commit:
        _keep_callbacks_apart(question.using)


def _flips(batch: Batch[M], results: Mapping[Any, Any]) -> Writes:
    """Return what to write to the handled rows; rows with the same values are one write."""
    processor, question = batch.processor, batch.question
    writing.refuse_moved(question, {pk: batch.rows[pk] for pk in results}, processor)
    flips = flip.flips(processor, batch.rows, results)
    if len(flips) > 1:
        groups = grouping.group(flips)
        rehearsal = batch.context.rehearsal
        if rehearsal is None or rehearsal.has_rules:
            return groups
        return grouping.merge(groups, question.model, question.using)
    return [(resolve(values), [pk]) for pk, values in flips.items()]


def _notes(batch: Batch[M], handled: Collection[Any]) -> Writes:
    """Return what to write to the rows that were not handled, and record their outcomes."""
    notes: Writes = []
    for pk in [pk for pk in batch.outcomes if pk not in handled]:
        batch.outcomes[pk], values = batch.notes(pk, batch.outcomes[pk])
        notes.append((resolve(values), [pk]))
    return notes


def _wait(batch: Batch[M], writes: Writes, transaction_id: str | None) -> bool:
    """Let the flips wait for the COMMIT, if each can be a statement of it; return whether."""
    transactions = batch.context.transactions
    if transaction_id is None or not transactions.can_wait:
        return False
    if not all(values for values, _ in writes):
        return False
    flips = writing.checked_flips(batch.question, writes, transaction_id)
    if flips is None:
        return False
    try:
        transactions.wait(flips, owner=batch)
    except Exception as error:
        if ends_the_run(error):
            raise
        return False  # writing the flip now raises the error again, and explains it
    return True


def _keep_callbacks_apart(using: str) -> None:
    """Make the on_commit() callbacks robust, as ``on_commit(robust=True)`` does.

    The rows are settled when the callbacks run. A callback that raises would make Django drop the
    later ones, and would look like a failed commit; a robust one makes Django log the error.
    """
    connection: Any = connections[using]  # the stubs know the callbacks as pairs
    connection.run_on_commit = [
        (sids, _raising_exceptions(call), True) for sids, call, _ in connection.run_on_commit
    ]


def _raising_exceptions(call: Callable[[], Any]) -> Callable[[], Any]:
    """Turn ``sys.exit()`` and the like into an error that Django logs, as rows are committed."""

    @wraps(call)
    def calling() -> None:
        try:
            call()
        except BaseException as error:
            if ends_the_run(error):
                raise
            raise as_exception(error)  # noqa: B904  # which says itself where it comes from

    # Django logs the callback's name, and a callable object may have none.
    calling.__qualname__ = getattr(call, "__qualname__", repr(call))
    return calling
