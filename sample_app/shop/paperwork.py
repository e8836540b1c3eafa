"""The paperwork of every order: a payment and an invoice."""

from __future__ import annotations

from decimal import Decimal

from django.db.models import DecimalField, F, QuerySet, Sum
from django.db.models.functions import Coalesce

from sample_app.shop.models import Invoice, Order, Payment


def add_paperwork(orders: QuerySet[Order]) -> None:
    """Give a payment and an invoice to each of the orders that has none."""
    # Another process may add them at the same time; the first one wins.
    unpaid = orders.filter(payment=None).order_by("pk").annotate(goods=_goods())
    Payment.objects.bulk_create(
        (Payment(order=order, amount=order.goods + order.freight) for order in unpaid),
        ignore_conflicts=True,
    )
    without = orders.filter(invoice=None).order_by("pk")
    Invoice.objects.bulk_create((Invoice(order=order) for order in without), ignore_conflicts=True)


def _goods() -> Coalesce:
    price = F("lines__quantity") * F("lines__unit_price")
    money = DecimalField(max_digits=10, decimal_places=2)
    return Coalesce(Sum(price, output_field=money), Decimal(0), output_field=money)
