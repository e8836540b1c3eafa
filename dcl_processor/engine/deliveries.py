"""The two orders of lock, work, flip and commit, which are the rows of the crash table."""

from __future__ import annotations

from collections.abc import Callable

from dcl_processor.engine.context import Context
from dcl_processor.engine.locked import claim, commit, handle_locked
from dcl_processor.engine.marked import claim_and_mark, hand_out, settle_ended
from dcl_processor.engine.rows import Batch
from dcl_processor.options.kinds import Delivery


def transactional(run: Context, batch: Batch) -> None:
    """Lock and check again → work → flip → commit."""
    claim(run, batch)  # BEGIN; lock and check again
    handle_locked(run, batch)  # in the transaction that has the locks
    # Race: work without flip. Both are in one transaction, which commits both or neither.
    commit(run, batch)  # the flips; COMMIT


def marked_first(run: Context, batch: Batch) -> None:
    """Lock and check again → mark → commit → work → settle, if the mark is still there.

    The mark is a claim, or the flip itself (AT_MOST_ONCE), or a lease (AT_LEAST_ONCE).
    """
    claim_and_mark(run, batch)  # committed: the row is hidden
    hand_out(run, batch)  # no transaction is open during the work
    # Race: lost lease that writes. A row that another worker has taken over has another lease.
    settle_ended(run)  # those whose handlers have ended


#: What delivers a batch, by the processor's option.
DELIVERIES: dict[str, Callable[[Context, Batch], None]] = {
    Delivery.TRANSACTIONAL: transactional,
    Delivery.AT_MOST_ONCE: marked_first,
    Delivery.AT_LEAST_ONCE: marked_first,
}
