"""Workers that are wrong on purpose, to see that chaos finds it."""

from __future__ import annotations

from dcl_processor import Delivery
from dcl_processor.engine import deliveries
from dcl_processor.engine.flips import flips
from dcl_processor.engine.lane import Lane
from dcl_processor.engine.settlement import COMMIT, Batch, Settlement
from dcl_processor.engine.work import handle_locked
from dcl_processor.settlement import writing


def install() -> None:
    """Replace two of the package's orders in this process."""
    deliveries.DELIVERIES[Delivery.TRANSACTIONAL] = _flip_in_another_transaction
    deliveries.DELIVERIES[Delivery.AT_MOST_ONCE] = _claim_uncommitted


def _flip_in_another_transaction(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
    """Lock, flip and commit; then work: a worker that dies in between has lost the row."""
    lane.claim(batch, after)
    if batch.rows:
        pks = [held.pk for held in batch.rows]
        writing.write(batch.question, pks, {"done": True}, lane.processor)
    lane.session.settle(Settlement(batch, (COMMIT,)))
    lane.session.begin([], None)
    handle_locked(lane, batch)
    return Settlement(batch, (COMMIT,))


def _claim_uncommitted(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
    """Work in the transaction that claims: a death before its commit repeats it."""
    lane.claim(batch, after)
    handle_locked(lane, batch)
    return flips(lane, batch)
