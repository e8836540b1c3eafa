"""Compares the orders that arrived at the warehouse with the orders that the shop sent there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from sample_app.shop.demo.verdict import Verdict, complaints
from sample_app.shop.demo.warehouse_stub import Arrival
from sample_app.shop.models import Order


def audit(due: Collection[int], log: Iterable[Arrival], *, leases_lost: int = 0) -> Verdict:
    """Judge the arrivals of these orders, which were due before."""
    log = list(log)
    arrivals = Counter(arrival.order for arrival in log)
    again = [number for number, times in arrivals.items() if times > 1]
    unexplained = _unexplained(log)
    unflagged = Order.objects.filter(number__in=due, in_warehouse=False)
    return Verdict(
        figures=(
            f"{len(due):,} due, {len(arrivals):,} arrived, {len(due - arrivals.keys()):,} missing; "
            f"{len(again):,} arrived again after a failed answer, "
            f"{len({arrival.key for arrival in log}):,} to be packed"
        ),
        complaints=complaints(
            ("never arrived: order", sorted(set(due) - arrivals.keys())),
            ("arrived, and was not due: order", sorted(arrivals.keys() - set(due))),
            ("arrived, and not flagged: order", list(unflagged.values_list("number", flat=True))),
            # A lost lease explains one arrival, but not which one.
            ("arrived again for no reason: order", unexplained[leases_lost:]),
        ),
        praise=(
            "All is well: each order arrived, and what arrived again is packed once."
            if due
            else "All is well: nothing was due, and nothing arrived."
        ),
    )


def _unexplained(log: Iterable[Arrival]) -> list[int]:
    """Return the orders that arrived again although the shop had got its answer."""
    failed = set(Order.objects.exclude(last_error="").values_list("number", flat=True))
    answered: set[int] = set()
    unexplained = []
    for arrival in log:
        if arrival.order in answered and arrival.order not in failed:
            unexplained.append(arrival.order)
        if arrival.acknowledged:
            answered.add(arrival.order)
    return unexplained
