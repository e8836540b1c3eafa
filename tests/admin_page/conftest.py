"""Users of the admin, and payments that are stuck."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone
from pytest_django import Settings

from sample_app.shop.models import Customer, Order, Payment

VIEW, OPERATE = "view_processors", "operate_processors"
NAME = "shop.capture_payments"

#: The permissions on rows that the back office's own pages need.
OF_PAYMENTS = ("view_payment", "change_payment", "view_order")

TOKEN = "t" * 32

MakePayments = Callable[..., list[Payment]]


@pytest.fixture(autouse=True)
def _with_a_ledger(settings: Settings) -> None:
    settings.DCL_PROCESSOR_LEDGER = True


def make_user(name: str, *codenames: str, is_staff: bool = True) -> User:
    user = User.objects.create_user(name, is_staff=is_staff)
    found = Permission.objects.filter(codename__in=codenames)
    assert found.count() == len(codenames)
    user.user_permissions.set(found)
    return user


@pytest.fixture
def users(db: None) -> dict[str, User | None]:
    return {
        "anonymous": None,
        "customer": make_user("customer", VIEW, OPERATE, is_staff=False),
        "staff": make_user("staff", *OF_PAYMENTS),
        "viewer": make_user("viewer", VIEW, *OF_PAYMENTS),
        "only operates": make_user("only operates", OPERATE, *OF_PAYMENTS),
        # May operate processors, and may not change the rows of this model.
        "reader": make_user("reader", VIEW, OPERATE, "view_payment"),
        "operator": make_user("operator", VIEW, OPERATE, *OF_PAYMENTS),
    }


@pytest.fixture
def as_user(users: dict[str, User | None]) -> Callable[[str], Client]:
    def client(name: str) -> Client:
        made = Client(enforce_csrf_checks=True)
        if (user := users[name]) is not None:
            made.force_login(user)
        return made

    return client


@pytest.fixture
def operator(as_user: Callable[[str], Client]) -> Client:
    return as_user("operator")


def grant(name: str, *codenames: str) -> None:
    """Give a user more permissions; it is the client's next request that has them."""
    user = User.objects.get(username=name)
    user.user_permissions.add(*Permission.objects.filter(codename__in=codenames))


def post(client: Client, address: str, **data: Any) -> Any:
    """Post with a token, as a form does."""
    client.cookies["csrftoken"] = TOKEN
    return client.post(address, {**data, "csrfmiddlewaretoken": TOKEN})


@pytest.fixture
def payments(db: None) -> MakePayments:
    customer = Customer.objects.create(code="ANNA", company="Café Anna", email="anna@example.com")

    def make(number: int, **values: Any) -> list[Payment]:
        first = Order.objects.count() + 1
        orders = Order.objects.bulk_create(
            Order(
                number=first + each,
                customer=customer,
                order_date=date(2024, 5, 1),
                required_date=date(2024, 5, 29),
                shipped_at=timezone.now(),
                freight="7.50",
            )
            for each in range(number)
        )
        return Payment.objects.bulk_create(
            Payment(order=order, amount=10, **values) for order in orders
        )

    return make


@pytest.fixture
def doubtful(payments: MakePayments) -> list[Payment]:
    return payments(
        2, state=Payment.State.CAPTURING, capturing_since=timezone.now() - timedelta(hours=2)
    )


@pytest.fixture
def refused(payments: MakePayments) -> list[Payment]:
    return [
        *payments(3, state=Payment.State.REFUSED, attempts=4, last_error="NotCharged: no route"),
        *payments(2, state=Payment.State.REFUSED, attempts=1, last_error="Refused: stolen card"),
    ]
