"""Payments in doubt: asks the gateway, because only it knows whether a card was charged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from sample_app.shop.payment_gateway import PaymentGateway
from sample_app.shop.processors import capture_payments


@dataclass(frozen=True, slots=True)
class Answer:
    """The gateway's answer for a payment in doubt; without a charge, it may be tried again."""

    order: int
    amount: Decimal
    charge_id: str | None


def resolve_doubts(gateway: PaymentGateway, *, older_than: float) -> Iterator[Answer]:
    """Settle each payment whose capture began over ``older_than`` seconds ago and never ended.

    ``older_than`` has to be longer than a charge may take, so that none is looked up too early.
    """
    doubtful = capture_payments.in_doubt(older_than=older_than)
    for payment in doubtful.select_related("order"):
        number = payment.order.number
        charge_id = gateway.find_charge(number)
        row = doubtful.filter(pk=payment.pk)
        # The gateway has answered, so that the claim need not be a minute old.
        if charge_id is None:
            capture_payments.requeue(row, force=True)
        else:
            capture_payments.mark_done(row, values={"charge_id": charge_id}, force=True)
        yield Answer(number, payment.amount, charge_id)
