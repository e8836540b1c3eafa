"""The possible orders of lock, work, flip and commit: each function is one row of the crash table.

The place where its transaction ends shows what a killed process leaves behind. What is left to send
is the value that it returns; ``after`` is what the delivery before it has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dcl_processor.definition.kinds import Delivery
from dcl_processor.exceptions import Unsupported

from .flips import flips
from .marked import handle_marked
from .marks import claim_mark, lease_mark
from .settlement import Batch, Settlement
from .settling import settle
from .work import handle_locked

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

    from .lane import Lane


def transactional(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
    """Lock and check again → work → flip → commit."""
    lane.claim(batch, after)  # [what ``after`` has left to send;] BEGIN; lock and check again
    handle_locked(lane, batch)  # in the transaction that has the locks
    # Race: work without flip. Both are in one transaction, which commits both or neither.
    return flips(lane, batch)  # the flips; COMMIT


def at_most_once(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
    """Lock and check again → claim, or flip → commit → work → settle, if the claim still stands."""
    lane.claim_and_mark(batch, claim_mark, after)  # [``after``;] committed: the row is hidden
    handle_marked(lane, batch)  # no transaction is open
    return settle(lane, batch)  # writes nothing to a row whose claim is gone


def at_least_once(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
    """Lock and check again → lease, attempt + 1 → commit → work → settle, if still leased."""
    lane.claim_and_mark(batch, lease_mark, after)
    handle_marked(lane, batch)
    # Race: lost lease that writes. A row that another worker has taken over has another lease.
    return settle(lane, batch)


Deliver = Callable[["Lane", Batch, Settlement | None], Settlement]

#: The function of each delivery, which has its rules in ``definition/kinds.py``.
DELIVERIES: dict[str, Deliver] = {
    Delivery.TRANSACTIONAL: transactional,
    Delivery.AT_MOST_ONCE: at_most_once,
    Delivery.AT_LEAST_ONCE: at_least_once,
}


def refuse_unknown(processor: Definition[Any]) -> None:
    """Raise ``Unsupported`` unless the processor's delivery has a function."""
    if processor.delivery not in DELIVERIES:
        raise Unsupported(
            f"{processor.name}: expected a delivery with a function, one of "
            f"{', '.join(map(str, DELIVERIES))}, got {processor.delivery!r}, which has only rules; "
            "add its function to DELIVERIES in dcl_processor/engine/deliveries.py."
        )
