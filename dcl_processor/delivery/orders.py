"""The possible orders of lock, work, flip and commit.

Each of the three functions is one row of the crash table: the place where its transaction ends
shows what a killed process leaves behind. Each takes the keys of some candidates and the number to
claim, and returns the outcomes of the candidates that were reached. The functions are generators
that yield while they wait for handlers on an event loop; with plain handlers they never yield.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.candidates.pending import Question
from dcl_processor.definition.kinds import Delivery
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import row_transaction
from dcl_processor.locking.transaction_guard import TransactionGuard

from . import inside, outside
from .batch import Batch, Run, Steps
from .marking import claim_and_mark
from .marks import ClaimMark, LeaseMark

M = TypeVar("M", bound=Model)


def transactional(
    run: Run, question: Question[M], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Lock and check again → work → flip → commit."""
    batch = Batch(run, question, pks, most)
    try:
        # Race: work without flip. Both are in one transaction, which commits both or neither.
        with row_transaction(question.using):
            batch.claimed(claim(question, pks, most))
            # A query without rows may not have been sent at all, and then no transaction is open.
            if batch.rows:
                run.rehearse(question, batch.rows)
                with TransactionGuard(question.using, batch.transaction_id) as guard:
                    inside.work(batch, guard)
                    inside.settle(batch, guard)
    except BaseException as error:  # noqa: BLE001  # judged there
        return (yield from batch.abandon(error, redo=transactional))
    return batch.all_outcomes()


def at_most_once(
    run: Run, question: Question[M], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Lock and check again → claim, or flip → commit → work → settle, if the claim still stands."""
    batch = Batch(run, question, pks, most)
    mark = ClaimMark(batch)
    with outside.cleared_up(batch, mark):
        try:
            claim_and_mark(batch, mark)
        except BaseException as error:  # noqa: BLE001  # judged there
            return (yield from batch.abandon(error, redo=at_most_once))
        yield from outside.work_and_settle(batch, mark)
    return batch.all_outcomes()


def at_least_once(
    run: Run, question: Question[M], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Lock and check again → lease, attempt + 1 → commit → work → settle, if still leased."""
    batch = Batch(run, question, pks, most)
    mark = LeaseMark(batch)
    with outside.cleared_up(batch, mark):
        try:
            claim_and_mark(batch, mark)
        except BaseException as error:  # noqa: BLE001  # judged there
            return (yield from batch.abandon(error, redo=at_least_once))
        yield from outside.work_and_settle(batch, mark)
    return batch.all_outcomes()


DELIVERIES = {
    Delivery.TRANSACTIONAL: transactional,
    Delivery.AT_MOST_ONCE: at_most_once,
    Delivery.AT_LEAST_ONCE: at_least_once,
}
