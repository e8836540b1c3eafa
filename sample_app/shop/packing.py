"""The packings of orders, which robots in the hall pull, one by one, over HTTP.

The processor is not in ``processors.py``, so that ``processors run --all`` leaves its rows to the
robots.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry
from sample_app.shop.models import Packing

#: The robot that asks for packings in this request.
robot: ContextVar[str] = ContextVar("robot", default="")

#: Packings that one robot may hold, so that a broken robot does not take all of them.
MOST_HELD = 3


class PackOrders(BatchProcessor[Packing]):
    """Hand each packing to one robot at a time, and store the weight that it reports."""

    name = "shop.pack_orders"
    delivery = Delivery.AT_LEAST_ONCE
    lease = Lease(60)
    retry = Retry(max_attempts=3, backoff=10)
    claim = {"state": Packing.State.PACKING, "packer": robot.get}
    claimed_at = "packing_since"
    failed = {"state": Packing.State.STUCK}
    reset = {"state": Packing.State.WAITING, "packer": ""}

    def pending(self) -> QuerySet[Packing]:
        """Return the packings that wait, and those whose robot may not come back."""
        held = Q(state=Packing.State.PACKING, leased_until__isnull=False)
        return Packing.objects.filter(Q(state=Packing.State.WAITING) | held).select_related("order")

    def process(self, packing: Packing, /) -> int:
        """Refuse: only robots pack."""
        raise NotImplementedError(f"robots pack {packing}; see packing_views")

    def get_done(self, packing: Packing, grams: int, /) -> Mapping[str, Any]:  # noqa: ARG002
        """Store the weight in the same write as the state."""
        return {"state": Packing.State.PACKED, "grams": grams}


pack_orders = PackOrders()


def has_room(name: str) -> bool:
    """Return whether a robot holds fewer packings than it may."""
    return pack_orders.in_progress().filter(packer=name).count() < MOST_HELD
