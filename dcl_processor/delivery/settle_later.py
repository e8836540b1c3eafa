"""A settlement that waits for the next claim, and is committed with it."""

from __future__ import annotations

from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.database.contention import is_database_error
from dcl_processor.execution.handler import Handled, Outcome
from dcl_processor.interrupts import ends_the_run
from dcl_processor.values import resolve

from . import compare_and_set
from .batch import Batch
from .marks import MarkedRows, Waiting
from .settle import expected_of, flip_of, settle, was_answered

M = TypeVar("M", bound=Model)


def settle_later(batch: Batch[M], pk: Any, outcome: Outcome) -> bool:
    """Let the settlement of a handled row wait for the next claim; return whether it waits."""
    marked = batch.marked
    assert marked is not None
    if not isinstance(outcome, Handled) or not _may_wait(batch, marked):
        return False
    # Race: work without flip. The work is done; after an interrupt the row is settled from here.
    marked.ended[pk] = outcome
    marked.waiting = Waiting(pk, outcome)
    try:
        expected = expected_of(batch, marked, pk)
        # The callables were called for this row, and must not be called again.
        values = marked.flips[pk] = resolve(flip_of(batch, marked, pk, outcome))
        statement = compare_and_set.statement(batch.question, pk, expected, values)
        if statement is None:
            return False
        # Until there is an answer it may have been written.
        marked.maybe_written.add(pk)
        batch.context.transactions.settle_later(statement, marked.waiting.answered, owner=batch)
    except BaseException as error:
        if ends_the_run(error):
            raise
        marked.maybe_written.discard(pk)
        return False  # settling the row now raises the error again, as the row's failure
    batch.outcomes[pk] = marked.ended.pop(pk)
    return True


def _may_wait(batch: Batch[Any], marked: MarkedRows) -> bool:
    return bool(
        marked.mark.option != "done"  # flipped before the work
        and batch.context.trusts_flips
        and batch.context.transactions.using(batch.question.using).can_settle_later
    )


def settlement_answered(batch: Batch[M], session: Any, error: BaseException | None) -> None:
    """Settle the row at once unless its settlement is known to be written.

    ``error``: of the message that contained the settlement; ``session``: the driver's connection.
    """
    marked = batch.marked
    assert marked is not None
    waiting, marked.waiting = marked.waiting, None
    assert waiting is not None
    pk, using = waiting.pk, batch.question.using
    is_interrupt = error is not None and ends_the_run(error)
    is_refused = error is not None and is_database_error(error) and not is_interrupt
    if error is None or (is_refused and was_answered(error, using, since=session)):
        marked.maybe_written.discard(pk)
    if not waiting.is_written:
        settle(batch, pk, waiting.outcome, is_last=is_interrupt)
