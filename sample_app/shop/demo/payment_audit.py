"""Compares the gateway's log of charges with the payments in the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from sample_app.shop.demo.payment_stub import Charge
from sample_app.shop.demo.verdict import Verdict, complaints
from sample_app.shop.models import Payment

State = Payment.State


def audit(due: Collection[int], log: Iterable[Charge]) -> Verdict:
    """Judge the outcome of the payments for these orders, which were due before."""
    log = list(log)
    charges = Counter(charge.order for charge in log)
    charge_ids = {charge.order: charge.charge_id for charge in log}
    payments = {
        payment.order.number: payment
        for payment in Payment.objects.filter(order__number__in=due).select_related("order")
    }
    captured = {n: p for n, p in payments.items() if p.state == State.CAPTURED}
    refused = [n for n, p in payments.items() if p.state == State.REFUSED]
    unlike = sorted(
        {n for n, p in captured.items() if charge_ids.get(n) != p.charge_id}
        | {n for n in charges if n not in captured}
    )
    doubtful = [n for n, p in payments.items() if p.state == State.CAPTURING]
    twice = [n for n, times in charges.items() if times > 1]
    return Verdict(
        figures=(
            f"{len(due):,} due, {len(charges) - len(twice):,} charged once, "
            f"{len(twice):,} charged twice, {len(refused):,} refused, "
            f"{len(doubtful):,} in doubt; "
            f"{len(captured) - len(unlike):,} charge ids stored as in the gateway's log"
        ),
        complaints=complaints(
            ("charged more than once: order", twice),
            ("table and gateway disagree on order", unlike),
            ("still in doubt: order", doubtful),
            ("never charged: order", [n for n, p in payments.items() if p.state == State.DUE]),
        ),
        praise=(
            "All is well: no card was charged twice, and the table agrees with the gateway's log."
            if due
            else "All is well: no payment was due, and no card was charged."
        ),
    )
