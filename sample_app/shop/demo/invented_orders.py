"""A file of invented orders, for a demo without one."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from random import Random

from django.db.models import Max
from django.utils import timezone
from faker import Faker

from sample_app.shop.models import Order
from sample_app.shop.orders_csv import COLUMNS

ORDERS = 400
CUSTOMERS = 60
SHIPPED_SHARE = 0.96
# Well above any number in a real file, so that the numbers of a file loaded later are free.
FIRST_NUMBER = 1_000_001


def write_invented_orders(path: Path) -> None:
    """Write orders with numbers after the highest in the database."""
    highest = Order.objects.aggregate(highest=Max("number"))["highest"] or 0
    first = max(highest + 1, FIRST_NUMBER)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_orders(first, timezone.localdate()))


def _orders(first: int, today: date) -> Iterator[tuple[object, ...]]:
    customers = list(_customers())
    chance = Random(first)  # noqa: S311 - nothing here is a secret
    for number in range(first, first + ORDERS):
        code, company, contact, city, country = chance.choice(customers)
        ordered = today - timedelta(days=chance.randint(10, 60))
        required = ordered + timedelta(days=28)
        shipped = ordered + timedelta(days=chance.randint(1, 9))
        freight = f"{chance.uniform(2, 300):.2f}"
        when_shipped = shipped if chance.random() < SHIPPED_SHARE else ""
        yield (
            number, code, company, contact, ordered, required, when_shipped, freight, city, country,
        )  # fmt: skip


def _customers() -> Iterator[tuple[str, ...]]:
    # The same seed each time, so that the invented customers are always the same.
    fake = Faker()
    fake.seed_instance(1)
    for serial in range(1, CUSTOMERS + 1):
        company = fake.company()
        letters = "".join(filter(str.isalpha, company))[:5].upper()
        yield f"{letters}-{serial}", company, fake.name(), fake.city(), fake.current_country()
