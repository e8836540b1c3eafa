"""What an operator asks of 1,000,000 pending rows, and what each answer costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.utils import timezone

from sample_app.shop.models import Customer, Order, Payment
from tests.edge.manage import processors

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 1_000_000
NAME = "shop.capture_payments"
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.settings"}

#: How many times a question may read the table. Each number of an answer is capped, but no index
#: leads to states that no row is in.
READINGS = 10

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


@dataclass(frozen=True)
class Answer:
    """What was printed, the seconds that it took, and the rows that the database read for it."""

    text: str
    seconds: float
    read: int


def rows_read() -> int:
    """Return how many rows the sessions have read that have ended, and this one."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables) "
            "+ (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes)"
        )
        return int(cursor.fetchone()[0])


def answered(ask: Callable[[], str]) -> Answer:
    before, began = rows_read(), time.monotonic()
    text = ask()
    seconds = time.monotonic() - began
    return Answer(text, seconds, rows_read() - before)


def command(*arguments: str) -> str:
    ran = processors(*arguments, **SETTINGS)
    assert ran.returncode in (0, 1), (arguments, ran.stdout, ran.stderr)
    return ran.stdout


def asked(payment: Payment, user: User) -> dict[str, Answer]:
    """Ask all questions."""
    client = Client()
    client.force_login(user)
    client.get("/admin/")

    def page(address: str) -> str:
        got = client.get(address)
        assert got.status_code == 200, address
        return got.content.decode()

    answers = {name: answered(partial(page, a)) for name, a in PAGES.items()}
    for name, arguments in QUESTIONS.items():
        given = [*arguments, str(payment.pk)] if name == "show" else arguments
        answers[name] = answered(partial(command, *given))
    return answers


def test_every_question_about_a_million_rows_is_answered(
    payment: Payment, admin_user: User
) -> None:
    before = asked(payment, admin_user)
    multiply(Order, number="n")
    multiply(Payment, order_id=f"{payment.order_id} + n - 1")
    after = asked(payment, admin_user)
    print(f"\nwith one row, and what {ROWS:,} rows add:")
    for name, answer in after.items():
        added = answer.seconds - before[name].seconds
        print(f"{name:20} {before[name].seconds:6.2f} s {added:+6.2f} s {answer.read:12,} rows")
        print(answer.text[-600:] if name in QUESTIONS else "")
    # More is not counted.
    for name in ("status", "list", "admin page"):
        assert "10,000+" in after[name].text, name
    assert {name: each.read for name, each in after.items() if each.read > READINGS * ROWS} == {}
