"""Workers that are wrong on purpose, to see that chaos finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcl_processor import Delivery
from dcl_processor.candidates.pending import Question
from dcl_processor.delivery import inside, orders
from dcl_processor.delivery.batch import Batch, Run, Steps
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import row_transaction
from dcl_processor.locking.transaction_guard import TransactionGuard
from dcl_processor.settlement import writing


def install() -> None:
    """Replace two of the package's orders in this process."""
    orders.DELIVERIES[Delivery.TRANSACTIONAL] = _flip_in_another_transaction
    orders.DELIVERIES[Delivery.AT_MOST_ONCE] = _claim_uncommitted


def _flip_in_another_transaction(
    run: Run, question: Question[Any], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Lock, flip and commit; then work: whoever dies in between has lost the row."""
    batch = Batch(run, question, pks, most)
    with row_transaction(question.using):
        batch.claimed(claim(question, pks, most))
        if batch.rows:
            writing.write(question, list(batch.rows), {"done": True}, run.processor.name)
    with row_transaction(question.using), TransactionGuard(question.using) as guard:
        inside.work(batch, guard)
    yield from ()
    return batch.all_outcomes()


def _claim_uncommitted(
    run: Run, question: Question[Any], pks: Sequence[Any], most: int | None = None
) -> Steps:
    """Work in the transaction that claims: whoever dies before its commit is repeated."""
    return orders.transactional(run, question, pks, most)
