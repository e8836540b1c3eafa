"""Invoices: the flag is in a related row, and each is printed once all the same."""

from __future__ import annotations

import pytest

from sample_app.shop.demo import invoice_stage
from sample_app.shop.models import Invoice, PrintedPage
from sample_app.shop.processors import print_invoices
from tests.sample_app.conftest import LoadOrders

pytestmark = pytest.mark.django_db(transaction=True)


def test_prints_the_invoices_of_shipped_orders_once(load_orders: LoadOrders) -> None:
    load_orders(7, 8, 9, unshipped=[9])

    assert print_invoices().processed == 2
    assert print_invoices().processed == 0

    printed = Invoice.objects.filter(printed=True)
    assert set(printed.values_list("order__number", flat=True)) == {7, 8}
    [page] = PrintedPage.objects.filter(invoice__order__number=7)
    assert page.text == "Invoice for order 7\nVins Étoile\n"
    assert invoice_stage.audit({7, 8}).clean


def test_the_audit_finds_what_went_wrong(load_orders: LoadOrders) -> None:
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
