"""The packings of orders, which robots in the hall pull, one by one, over HTTP.

The processor is not in ``processors.py``, so that ``processors run --all`` leaves its rows to the
robots.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry
from sample_app.shop.models import Packing, Robot

#: The robot that asks for packings in this request.
robot: ContextVar[str] = ContextVar("robot", default="")

#: Packings that one robot may hold, so that a broken robot does not take all of them.
MOST_HELD = 3


class PackOrders(BatchProcessor[Packing]):
    """Hand each packing to one robot at a time, and store the weight that it reports."""

    name = "shop.pack_orders"
    delivery = Delivery.AT_LEAST_ONCE
    # Seconds after which a packing whose robot does not come back is handed out again.
    lease = Lease(60.0)
    retry = Retry(max_attempts=3, backoff=10)
    # No constant, by which in_progress() would leave out what is confirmed.
    claim = {"state": Packing.State.PACKING, "packer": robot.get, "confirmed": lambda: False}
    claimed_at = "packing_since"
    failed = {"state": Packing.State.STUCK}
    reset = {"state": Packing.State.WAITING, "packer": "", "confirmed": False}

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
    """Return whether a robot holds fewer packings than it may, at this moment."""
    return held_by(name).count() < MOST_HELD


def held_by(name: str) -> QuerySet[Packing]:
    """Return the packings that were confirmed to a robot, and whose leases are alive."""
    return pack_orders.in_progress().filter(packer=name, confirmed=True)


@transaction.atomic
def is_within_limit(name: str) -> bool:
    """Return whether a robot holds no more packings than it may, after it has renewed one.

    A lease that has lapsed is not counted, and the robot may have pulled others before it renews
    it. So it is counted afterwards, as what is pulled: two requests cannot both find room.
    """
    Robot.objects.select_for_update().get_or_create(name=name)
    return held_by(name).count() <= MOST_HELD


@transaction.atomic
def confirm(name: str, packing: Packing) -> bool:
    """Let a robot keep a packing that was reserved for it; return ``False`` if it has no room.

    Two requests of one robot may reserve at the same time, after each has found room: ``reserve()``
    makes its own commit, so that no lock can be held around both. So what they have reserved is
    counted afterwards, one request after the other, and only what is confirmed counts.
    """
    # Committed with what it guards: the next request counts what this one has confirmed.
    Robot.objects.select_for_update().get_or_create(name=name)
    if not has_room(name):
        return False
    ours = pack_orders.in_progress().filter(pk=packing.pk, packer=name)
    return ours.update(confirmed=True) == 1
