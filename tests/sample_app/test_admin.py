"""The shop's back office loads, empty and full."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from sample_app.shop.models import Order, Payment

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("model", ["cart", "customer", "invoice", "order", "payment"])
def test_lists_and_forms_load_without_any_rows(admin_client: Client, model: str) -> None:
    assert admin_client.get(f"/admin/shop/{model}/").status_code == 200
    assert admin_client.get(f"/admin/shop/{model}/add/").status_code == 200


def test_pages_show_the_orders(admin_client: Client, order_file: Path) -> None:
    call_command("load_orders", str(order_file), "--invent-lines")
    order = Order.objects.select_related("customer").get(number=10248)

    index = admin_client.get("/admin/shop/order/?shipped_email_sent__exact=0").content.decode()
    found = admin_client.get("/admin/shop/order/?q=10248").content.decode()
    page = admin_client.get(f"/admin/shop/order/{order.pk}/change/").content.decode()

    assert "830 orders" in index
    assert "1 result" in found
    assert order.customer.company in found
    assert all(line.product in page for line in order.lines.all())


def test_payments_in_doubt_can_be_listed(admin_client: Client, order_file: Path) -> None:
    call_command("load_orders", str(order_file))
    Payment.objects.filter(order__number=10250).update(
        state=Payment.State.CAPTURING, capturing_since=timezone.now()
    )

    page = admin_client.get("/admin/shop/payment/?state__exact=capturing").content.decode()

    assert "1 payment" in page
    assert "Order 10250" in page


def test_the_order_list_costs_the_same_however_many_orders(
    admin_client: Client, order_file: Path, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    call_command("load_orders", str(order_file))

    with django_assert_max_num_queries(12):
        admin_client.get("/admin/shop/order/")
