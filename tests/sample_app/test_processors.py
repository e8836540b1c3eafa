"""The shop's notes, carts and invoices, at real work."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.management import call_command
from django.utils import timezone

from sample_app.shop.models import (
    Cart,
    Customer,
    Invoice,
    Order,
    OrderNote,
    PrintedPage,
    StockReturn,
)
from sample_app.shop.processors import CART_KEPT, expire_carts, note_overdue_orders, print_invoices
from tests.sample_app.conftest import LoadOrders, WriteOrders, order_line


@pytest.mark.django_db(transaction=True)
def test_notes_each_overdue_order_once(write_orders: WriteOrders) -> None:
    today = timezone.localdate()
    call_command(
        "load_orders",
        str(
            write_orders(
                order_line(1, shipped_date="", required_date=today - timedelta(days=1)),
                order_line(2, shipped_date="", required_date=today),
                order_line(3, required_date=today - timedelta(days=1)),
            )
        ),
    )

    assert note_overdue_orders().processed == 1
    assert note_overdue_orders().processed == 0

    note = OrderNote.objects.get()
    assert note.order.number == 1
    assert note.text == f"Was due on {today - timedelta(days=1)}, and has not shipped."
    assert list(Order.objects.filter(overdue_noted=True)) == [note.order]


# --- carts: each forgotten one expires once, a hundred to a transaction


HOUR = timedelta(hours=1)


def carts(number: int, *, age: timedelta) -> set[int]:
    customer, _ = Customer.objects.get_or_create(code="A", company="A", email="a@example.com")
    touched = timezone.now() - age
    made = Cart.objects.bulk_create(
        Cart(customer=customer, pieces=n % 7, touched_at=touched) for n in range(number)
    )
    return {cart.pk for cart in made}


@pytest.mark.django_db(transaction=True)
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


@pytest.mark.django_db(transaction=True)
def test_prints_the_invoices_of_shipped_orders_once(load_orders: LoadOrders) -> None:
    load_orders(7, 8, 9, unshipped=[9])

    assert print_invoices().processed == 2
    assert print_invoices().processed == 0

    printed = Invoice.objects.filter(printed=True)
    assert set(printed.values_list("order__number", flat=True)) == {7, 8}
    [page] = PrintedPage.objects.filter(invoice__order__number=7)
    assert page.text == "Invoice for order 7\nVins Étoile\n"
