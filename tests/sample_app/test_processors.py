"""The shop's mails and notes, at real work."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.management import call_command
from django.test import override_settings
from django.utils import timezone

from sample_app.mail_settings import smtp_settings
from sample_app.shop.demo.mailbox import HOST, Mailbox
from sample_app.shop.models import (
    Cart,
    Customer,
    Invoice,
    Order,
    OrderNote,
    PrintedPage,
    StockReturn,
)
from sample_app.shop.processors import (
    CART_KEPT,
    expire_carts,
    note_overdue_orders,
    print_invoices,
    send_shipped_emails,
)
from tests.sample_app.conftest import LoadOrders, WriteOrders, order_line


@pytest.mark.django_db(transaction=True)
def test_a_mail_that_fails_leaves_its_order_due_and_the_others_sent(
    write_orders: WriteOrders, mailbox: Mailbox
) -> None:
    call_command("load_orders", str(write_orders(*(order_line(n) for n in (7, 8, 9)))))
    eighth = Order.objects.get(number=8)
    eighth.customer = Customer.objects.create(
        code="BAD", company="Nowhere", email="two@example.com\nlines"
    )
    eighth.save()

    report = send_shipped_emails()

    assert (report.processed, report.failed) == (2, 1)
    assert [mail.order_number for mail in mailbox.mails] == [7, 9]
    # It is not known what state the failure left the first in.
    assert mailbox.sessions == 2
    assert [order.number for order in send_shipped_emails.pending()] == [8]


@pytest.mark.django_db(transaction=True)
def test_a_mail_server_that_is_gone_ends_the_run_and_charges_no_order(
    write_orders: WriteOrders, closed_port: int
) -> None:
    call_command("load_orders", str(write_orders(*(order_line(n) for n in (7, 8, 9)))))

    with override_settings(**smtp_settings(HOST, closed_port)):
        report = send_shipped_emails()

    assert (report.stopped, report.processed, report.failed) == ("failures", 0, 0)
    assert send_shipped_emails.pending().count() == 3


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


# --- what a line of an order file may look like, and what is said of one that does not


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
