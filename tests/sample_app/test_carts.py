"""Carts: each forgotten one expires once, a hundred to a transaction."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from sample_app.shop.models import Cart, Customer, Invoice, PrintedPage, StockReturn
from sample_app.shop.processors import CART_KEPT, expire_carts, print_invoices
from tests.sample_app.conftest import LoadOrders

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def carts(number: int, *, age: timedelta) -> set[int]:
    customer, _ = Customer.objects.get_or_create(code="A", company="A", email="a@example.com")
    touched = timezone.now() - age
    made = Cart.objects.bulk_create(
        Cart(customer=customer, pieces=n % 7, touched_at=touched) for n in range(number)
    )
    return {cart.pk for cart in made}


def test_forgotten_carts_expire_and_fresh_ones_stay() -> None:
    due = carts(250, age=CART_KEPT + HOUR)
    carts(3, age=CART_KEPT - HOUR)

    report = expire_carts()

    assert (report.processed, report.failed) == (250, 0)
    assert expire_carts().processed == 0
    assert set(Cart.objects.filter(expired=True).values_list("pk", flat=True)) == due
    returned = StockReturn.objects.values_list("cart_id", "pieces")
    assert sorted(returned) == sorted(Cart.objects.filter(expired=True).values_list("pk", "pieces"))


# --- invoices: the flag is in a related row, and each is printed once all the same


def test_prints_the_invoices_of_shipped_orders_once(load_orders: LoadOrders) -> None:
    load_orders(7, 8, 9, unshipped=[9])

    assert print_invoices().processed == 2
    assert print_invoices().processed == 0

    printed = Invoice.objects.filter(printed=True)
    assert set(printed.values_list("order__number", flat=True)) == {7, 8}
    [page] = PrintedPage.objects.filter(invoice__order__number=7)
    assert page.text == "Invoice for order 7\nVins Étoile\n"
