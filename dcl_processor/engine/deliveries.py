"""The possible orders of lock, work, flip and commit: each function is one row of the crash table.

The place where its transaction ends shows what a killed process leaves behind. What is left to send
is the value that it returns; ``after`` is what the delivery before it has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dcl_processor.definition.kinds import Delivery

from .flips import flips
from .settlement import Batch, Settlement
from .work import handle_locked

if TYPE_CHECKING:
    from .lane import Lane


def transactional(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
    """Lock and check again → work → flip → commit."""
    lane.claim(batch, after)  # [what ``after`` has left to send;] BEGIN; lock and check again
    handle_locked(lane, batch)  # in the transaction that has the locks
    # Race: work without flip. Both are in one transaction, which commits both or neither.
    return flips(lane, batch)  # the flips; COMMIT


#: The function of each delivery, which has its rules in ``definition/kinds.py``.
DELIVERIES: dict[str, Callable[[Lane, Batch, Settlement | None], Settlement]] = {
    Delivery.TRANSACTIONAL: transactional,
}
