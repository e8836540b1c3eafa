"""Work, and settle, inside the transaction that holds the rows' locks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.exceptions import TransactionLost, UnseenWork
from dcl_processor.execution.handler import (
    Failed,
    Handled,
    Outcome,
    as_exception,
    ends_the_run,
    execute,
    execute_together,
)
from dcl_processor.execution.scope import RowScope
from dcl_processor.locking.contention import was_ended_by_server
from dcl_processor.locking.fence import Fence
from dcl_processor.settlement import flip, grouping, writing

from .batch import Batch

M = TypeVar("M", bound=Model)


def work(batch: Batch[M], fence: Fence) -> None:
    """Handle the rows, each so that its failure costs the others nothing."""
    run, processor, connection = batch.run, batch.processor, connections[batch.question.using]
    if processor._handles_batches and len(batch.rows) > 1:
        with RowScope(connection, shared=False) as scope:
            together = _work_together(batch)
        fence.check()
        scope.close(Handled())
        batch.outcomes.update(zip(batch.rows, together, strict=True))
        if any(isinstance(outcome, Failed) for outcome in together):
            run.resource.worn()
        return
    shared = len(batch.rows) > 1 or processor._notes_failures
    run.at_hand.note(batch.rows)
    for place, (pk, row) in enumerate(batch.rows.items()):
        if not run.may_start(batch.outcomes):
            break
        batch.started.add(pk)
        if len(batch.rows) > 1:
            run.at_hand.narrow(place, pk)
        with RowScope(connection, shared=shared) as scope:
            outcome = execute(processor, row, run.resource.arguments())
        # Noted before it is known whether it can be kept: an error from here on is the row's.
        batch.outcomes[pk] = outcome
        try:
            fence.check()
            batch.outcomes[pk] = scope.close(outcome)
        except (TransactionLost, UnseenWork) as error:
            # Looked for after each row, so that it is this one's.
            batch.to_blame = None if was_ended_by_server(error) else pk
            raise
        if isinstance(outcome, Failed):
            run.resource.worn()


def _work_together(batch: Batch[M]) -> list[Outcome]:
    resource = batch.run.resource
    batch.started.update(batch.rows)
    batch.run.at_hand.note(batch.rows)
    try:
        return execute_together(batch.processor, [*batch.rows.values()], resource.arguments())
    except BaseException:
        # The rows are about to be redone, and what is open may be what failed.
        resource.worn()
        raise


def settle(batch: Batch[M], fence: Fence) -> None:
    """Flip the rows that were handled, and note what became of the others.

    Raises when that cannot be done; the transaction must then be rolled back.
    """
    processor, question = batch.processor, batch.question
    handled = {pk: o.result for pk, o in batch.outcomes.items() if isinstance(o, Handled)}
    writing.refuse_moved(question, {pk: batch.rows[pk] for pk in handled}, processor.name)
    flips = flip.flips(processor, batch.rows, handled)
    writes = grouping.group(flips)
    notes = []
    for pk in [pk for pk in batch.outcomes if pk not in handled]:
        batch.outcomes[pk], values = batch.notes(pk, batch.outcomes[pk])
        notes.append((writing.resolve(values), [pk]))
    # Race: flip without work. A transaction that ended took the lock and the work with it, and the
    # flip would be alone in the next one. None of the user's code runs between this and the flip.
    fence.close()
    if fence.transaction_id is not None and not any(values for values, _ in writes + notes):
        writing.refuse_another(question.using, fence.transaction_id)
    for values, pks in writes:
        with flip.refusing_values(processor):
            writing.write(question, pks, values, processor.name, fence.transaction_id)
    for values, pks in notes:
        writing.write(question, pks, values, processor.name, fence.transaction_id)
    # It could not be rehearsed beforehand, or one row's rehearsal did not speak for all rows.
    if handled and "done" in batch.run.doubtful:
        writing.refuse_pending(processor, question, list(handled))
    _keep_callbacks_apart(question.using)


def _keep_callbacks_apart(using: str) -> None:
    """Make the on_commit() callbacks robust, as ``on_commit(robust=True)`` does.

    The rows are settled when they run. One that raises would make Django drop those behind it,
    and look like a commit that failed; Django logs it instead.
    """
    connection: Any = connections[using]  # the stubs know the callbacks as pairs
    connection.run_on_commit = [
        (sids, _raising_exceptions(call), True) for sids, call, _ in connection.run_on_commit
    ]


def _raising_exceptions(call: Callable[[], Any]) -> Callable[[], Any]:
    """Turn ``sys.exit()`` and the like into what Django logs: the rows are committed."""

    @wraps(call)
    def calling() -> None:
        try:
            call()
        except BaseException as error:
            if ends_the_run(error):
                raise
            raise as_exception(error)  # noqa: B904  # which says itself where it comes from

    # Django names the callback in its log, which may be an object without a name of its own.
    calling.__qualname__ = getattr(call, "__qualname__", repr(call))
    return calling
