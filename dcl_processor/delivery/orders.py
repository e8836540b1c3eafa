"""The orders in which lock, work, flip and commit can follow each other.

Each of the three functions is one row of the crash table; what a killed process leaves behind can
be read off the place where its transaction ends. All of them take the keys of some candidates, and
how many to claim of these, and return the outcomes of those that were reached. They are
generators, and yield where handlers are waited for that run on an event loop; with plain handlers
they never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.candidates.pending import Question
from dcl_processor.definition.kinds import Delivery
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.fence import Fence
from dcl_processor.locking.isolation import row_transaction

from . import inside, outside
from .batch import Batch, Run, Steps
from .marking import claim_and_mark
from .marks import ClaimMark, LeaseMark

M = TypeVar("M", bound=Model)


def transactional(
    run: Run, question: Question[M], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Lock and ask again → work → flip → commit."""
    batch = Batch(run, question, pks, most)
    try:
        # Race: work without flip. Both are in one transaction: both are committed, or none is.
        with row_transaction(question.using):
            batch.claimed(claim(question, pks, most))
            # A question with no answer may not have been sent at all, and nothing is open then.
            if batch.rows:
                run.rehearse(question, batch.rows)
                with Fence(question.using, batch.transaction_id) as fence:
                    inside.work(batch, fence)
                    inside.settle(batch, fence)
    except BaseException as error:  # noqa: BLE001  # judged there
        return (yield from batch.abandon(error, redo=transactional))
    return batch.all_outcomes()


def at_most_once(
    run: Run, question: Question[M], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Lock and ask again → claim, or flip → commit → work → settle, if the claim still stands."""
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
    """Lock and ask again → lease, attempt + 1 → commit → work → settle, if the lease is ours."""
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
