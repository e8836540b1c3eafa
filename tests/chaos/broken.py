"""Workers that are wrong on purpose, to see that chaos finds it."""

from __future__ import annotations

from typing import Any

from dcl_processor import Delivery
from dcl_processor.delivery import deliveries, in_transaction
from dcl_processor.delivery.batch import Batch
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.transaction_guard import TransactionGuard
from dcl_processor.settlement import writing


def install() -> None:
    """Replace two of the package's orders in this process."""
    deliveries.DELIVERIES[Delivery.TRANSACTIONAL] = _flip_in_another_transaction
    deliveries.DELIVERIES[Delivery.AT_MOST_ONCE] = _claim_uncommitted


def _flip_in_another_transaction(batch: Batch[Any]) -> None:
    """Lock, flip and commit; then work: a worker that dies in between has lost the row."""
    question = batch.question
    with ReadCommitted(question.using):
        batch.take(claim(question, batch.wanted))
        if batch.rows:
            writing.write(question, list(batch.rows), {"done": True}, batch.processor)
    with ReadCommitted(question.using), TransactionGuard(question.using) as guard:
        in_transaction.handle(batch, guard)


def _claim_uncommitted(batch: Batch[Any]) -> None:
    """Work in the transaction that claims: a death before its commit repeats it."""
    deliveries.transactional(batch)
