"""Carts: each forgotten one expires once, a hundred to a transaction."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from sample_app.shop.demo import cart_stage, invoice_stage
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
    due, fresh = carts(250, age=CART_KEPT + HOUR), carts(3, age=CART_KEPT - HOUR)

    report = expire_carts()

    assert (report.processed, report.failed) == (250, 0)
    assert expire_carts().processed == 0
    assert set(Cart.objects.filter(expired=True).values_list("pk", flat=True)) == due
    returned = StockReturn.objects.values_list("cart_id", "pieces")
    assert sorted(returned) == sorted(Cart.objects.filter(expired=True).values_list("pk", "pieces"))
    verdict = cart_stage.audit(due, fresh)
    assert verdict.clean
    assert verdict.figures == "250 due, 250 expired exactly once; 3 of 3 fresh carts untouched"


def test_a_hundred_go_into_one_transaction() -> None:
    carts(200, age=CART_KEPT + HOUR)

    with CaptureQueriesContext(connection) as queries:
        expire_carts()

    inserts = [q for q in queries.captured_queries if q["sql"].startswith("INSERT")]
    assert len(inserts) == 2


def test_the_audit_finds_what_went_wrong() -> None:
    unexpired, lost, twice, wrong, good = sorted(carts(5, age=CART_KEPT + HOUR))
    [fresh] = carts(1, age=HOUR)
    Cart.objects.exclude(pk=unexpired).update(expired=True, pieces=2)
    for pk, pieces in ((twice, 1), (twice, 1), (wrong, 5), (good, 2), (unexpired, 0)):
        StockReturn.objects.create(cart_id=pk, pieces=pieces)

    verdict = cart_stage.audit({unexpired, lost, twice, wrong, good}, {fresh})

    assert verdict.figures == "5 due, 1 expired exactly once; 0 of 1 fresh carts untouched"
    assert verdict.complaints == (
        f"not expired: cart {unexpired}",
        f"expired, and nothing is back on the shelf: cart {lost}",
        f"back on the shelf more than once: cart {twice}",
        f"not as much back on the shelf as there was in cart {wrong}",
        f"fresh, yet expired: cart {fresh}",
    )


# --- invoices: the flag is in a related row, and each is printed once all the same


def test_prints_the_invoices_of_shipped_orders_once(load_orders: LoadOrders) -> None:
    load_orders(7, 8, 9, unshipped=[9])

    assert print_invoices().processed == 2
    assert print_invoices().processed == 0

    printed = Invoice.objects.filter(printed=True)
    assert set(printed.values_list("order__number", flat=True)) == {7, 8}
    [page] = PrintedPage.objects.filter(invoice__order__number=7)
    assert page.text == "Invoice for order 7\nVins Étoile\n"
    assert invoice_stage.audit({7, 8}).clean


def test_the_audit_of_invoices_finds_what_went_wrong(load_orders: LoadOrders) -> None:
    load_orders(7, 8, 9)
    by_number = {invoice.order.number: invoice for invoice in Invoice.objects.all()}
    Invoice.objects.filter(order__number__in=(7, 9)).update(printed=True)
    for _ in range(2):
        by_number[9].pages.create(text="")

    verdict = invoice_stage.audit({7, 8, 9})

    assert verdict.figures == "3 due, 0 printed exactly once"
    assert verdict.complaints == (
        "flagged, and not printed: order 7",
        "not flagged: order 8",
        "printed more than once: order 9",
    )
