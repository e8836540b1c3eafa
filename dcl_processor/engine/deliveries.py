"""The possible orders of lock, work, flip and commit, which are the rows of the crash table.

The place where its transaction ends shows what a killed process leaves behind. What is left to send
is the value that it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dcl_processor.definition.kinds import Delivery

from .flips import flips
from .marked import handle_marked
from .settlement import Batch, Settlement
from .settling import settle
from .work import handle_locked

if TYPE_CHECKING:
    from .lane import Lane


def transactional(lane: Lane, batch: Batch) -> Settlement:
    """Lock and check again → work → flip → commit."""
    lane.claim(batch)  # BEGIN; lock and check again
    handle_locked(lane, batch)  # in the transaction that has the locks
    # Race: work without flip. Both are in one transaction, which commits both or neither.
    return flips(lane, batch)  # the flips; COMMIT


def marked_first(lane: Lane, batch: Batch) -> Settlement:
    """Lock and check again → mark → commit → work → settle, if the mark is still there.

    The mark is a claim, or the flip itself (AT_MOST_ONCE), or a lease (AT_LEAST_ONCE).
    """
    lane.claim_and_mark(batch)  # committed: the row is hidden
    handle_marked(lane, batch)  # no transaction is open
    # Race: lost lease that writes. A row that another worker has taken over has another lease.
    return settle(lane, batch)


Deliver = Callable[["Lane", Batch], Settlement]

#: The function of each delivery, which has its rules in ``definition/kinds.py``.
DELIVERIES: dict[str, Deliver] = {
    Delivery.TRANSACTIONAL: transactional,
    Delivery.AT_MOST_ONCE: marked_first,
    Delivery.AT_LEAST_ONCE: marked_first,
}
