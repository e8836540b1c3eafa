"""What an operator asks of 1,000,000 pending rows, and what each answer costs."""

from __future__ import annotations

import time
from datetime import date

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.utils import timezone

from sample_app.shop.models import Customer, Order, Payment
from tests.edge.manage import processors, started

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 1_000_000
NAME = "shop.capture_payments"
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.settings"}

#: Seconds that a million rows may add to an answer: what is wanted, and what is red. The
#: questions themselves wait 5 s for the database at most.
WANTED, MOST = 1.0, 10.0

#: The questions of the command; the key of a row follows `show`.
QUESTIONS: dict[str, list[str]] = {
    "status": ["status", NAME],
    "list": ["list"],
    "rows --in-doubt": ["rows", NAME, "--in-doubt"],
    "show": ["show", NAME],
    "explain": ["explain", NAME],
    "doctor": ["doctor", NAME],
    "requeue --dry-run": ["requeue", NAME, "--in-doubt", "--dry-run"],
}
PAGES = {
    "admin page": "/admin/dcl_admin/processor/",
    "its page of one": f"/admin/dcl_admin/processor/{NAME.replace('_', '_5F')}/change/",
    "list of a model": "/admin/shop/payment/",
}


def multiply(model: type[Model], **values: str) -> None:
    """Insert copies of the only row, with values that are SQL over ``n``, the copy's number."""
    columns = [str(each.column) for each in model._meta.concrete_fields if not each.primary_key]
    chosen = ", ".join(values.get(each, f"a_row.{each}") for each in columns)
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) "  # noqa: S608  # names of the models
            f"SELECT {chosen} FROM {table} a_row, generate_series(2, {ROWS}) n"
        )
        cursor.execute(f"ANALYZE {table}")


@pytest.fixture
def payment() -> Payment:
    """Make a payment that is due."""
    customer = Customer.objects.create(code="ANNA", company="Café Anna", email="anna@example.com")
    order = Order.objects.create(
        number=1,
        customer=customer,
        order_date=date(2024, 5, 1),
        required_date=date(2024, 5, 29),
        shipped_at=timezone.now(),
        shipped_email_sent=True,
        freight="7.50",
    )
    return Payment.objects.create(order=order, amount="7.50")


def asked(payment: Payment, user: User) -> dict[str, float]:
    """Ask all questions; return the seconds of each."""
    seconds: dict[str, float] = {}
    client = Client()
    client.force_login(user)
    client.get("/admin/")
    for name, address in PAGES.items():
        began = time.monotonic()
        answer = client.get(address)
        seconds[name] = time.monotonic() - began
        assert answer.status_code == 200, name
    began = time.monotonic()
    with started("rows", NAME, "--due", **SETTINGS) as process:  # it prints all of them
        assert process.stdout is not None
        assert process.stdout.readline()
        seconds["rows --due, first"] = time.monotonic() - began
        process.kill()
    for name, arguments in QUESTIONS.items():
        given = [*arguments, str(payment.pk)] if name == "show" else arguments
        began = time.monotonic()
        ran = processors(*given, **SETTINGS)
        seconds[name] = time.monotonic() - began
        # 3: something could not be found out in the time that a question has, and is said so.
        assert ran.returncode in (0, 1, 3), (name, ran.stdout, ran.stderr)
        print(f"--- {name}\n{ran.stdout[-600:]}{ran.stderr[-600:]}")
    return seconds


def test_every_question_about_a_million_rows_is_answered_soon(
    payment: Payment, admin_user: User
) -> None:
    before = asked(payment, admin_user)
    multiply(Order, number="n")
    multiply(Payment, order_id=f"{payment.order_id} + n - 1")
    after = asked(payment, admin_user)
    added = {name: after[name] - before[name] for name in after}
    print(f"\nwith one row, and what {ROWS:,} rows add:")
    for name, seconds in added.items():
        mark = "" if seconds < WANTED else f"  (wanted: {WANTED:g} s)"
        print(f"{name:20} {before[name]:6.2f} s  {seconds:+6.2f} s{mark}")
    assert {name: seconds for name, seconds in added.items() if seconds > MOST} == {}
