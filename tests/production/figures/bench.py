"""What the measurements share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ROUNDS = 5


def seconds(do: Callable[[], Any]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def say(what: str, value: float, unit: str = "×") -> None:
    print(f"  {what}: {value:.3g}{unit}", flush=True)


def statement(sql: str, *parameters: Any) -> Any:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(sql, parameters or None)
        return cursor.fetchall() if cursor.description else None


def parcels(total: int, pending: int) -> None:
    """Have so many parcels, of which the last are pending."""
    statement("TRUNCATE tests_parcel RESTART IDENTITY CASCADE")
    statement(
        "INSERT INTO tests_parcel (sent, tries, priority, note)"
        " SELECT n <= %s, 0, 0, repeat('x', 60) FROM generate_series(1, %s) n",
        total - pending,
        total,
    )
    statement("VACUUM (ANALYZE) tests_parcel")


def processor(**options: Any) -> Any:
    from dcl_processor import batch_processor
    from tests.models import Parcel

    options = {"pending": Parcel.objects.filter(sent=False), "done": {"sent": True}, **options}
    handler = options.pop("handler", lambda row: None)
    return batch_processor(**options)(handler)


@contextmanager
def index() -> Iterator[None]:
    statement("CREATE INDEX waiting ON tests_parcel (id) WHERE NOT sent")
    statement("ANALYZE tests_parcel")
    try:
        yield
    finally:
        statement("DROP INDEX waiting")


@contextmanager
def nothing() -> Iterator[None]:
    yield
