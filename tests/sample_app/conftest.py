"""Order files, and an empty database for commands run as processes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from django.core.management import call_command

from sample_app.embedded import database_url
from sample_app.shop.demo.workers import MANAGE_PY
from sample_app.shop.orders_csv import COLUMNS
from tests.servers.scratch import connect, scratch
from tests.waiting import PATIENCE

ORDERS, SHIPPED = 830, 809

WriteOrders = Callable[..., Path]
LoadOrders = Callable[..., None]
Start = Callable[..., subprocess.Popen[str]]
LookAtOrders = Callable[[], dict[int, tuple[bool, bool]]]


def order_line(number: object, **changes: object) -> str:
    """Return one line of an order file that is good but for the changes."""
    cells: dict[str, object] = {
        "order_id": number,
        "customer_id": "VINET",
        "company": "Vins Étoile",
        "contact_name": "Paul Martin",
        "order_date": "1996-07-04",
        "required_date": "1996-08-01",
        "shipped_date": "1996-07-16",
        "freight": "32.38",
        "ship_city": "Reims",
        "ship_country": "France",
    }
    return ",".join(str(cell) for cell in (cells | changes).values())


@pytest.fixture
def write_orders(tmp_path: Path) -> WriteOrders:
    """Write an order file of these lines; give its path."""

    def write(*lines: str) -> Path:
        path = tmp_path / "orders.csv"
        path.write_text("\n".join((",".join(COLUMNS), *lines)) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def load_orders(write_orders: WriteOrders) -> LoadOrders:
    """Load orders of these numbers, with a payment and an invoice each."""

    def load(*numbers: int, unshipped: Sequence[int] = ()) -> None:
        lines = (
            order_line(number, **({"shipped_date": ""} if number in unshipped else {}))
            for number in numbers
        )
        path = write_orders(*lines)
        call_command("load_orders", str(path), stdout=io.StringIO())

    return load


@pytest.fixture
def order_file(write_orders: WriteOrders) -> Path:
    """Give a file of 830 orders of 89 customers, of which all but 21 have shipped."""
    return write_orders(
        *(
            order_line(
                10248 + index,
                customer_id=f"C{index % 89}",
                shipped_date="" if index % 40 == 0 else "1996-07-16",
            )
            for index in range(ORDERS)
        )
    )


@pytest.fixture
def empty_database() -> Iterator[str]:
    """Give the URL of an empty PostgreSQL database, and drop it in the end."""
    given = os.environ.get("DATABASE_URL", "")
    server = given if given.startswith("postgres") else database_url("postgres")
    with scratch(server, "demo") as url:
        yield url


@pytest.fixture
def start(empty_database: str, tmp_path: Path) -> Iterator[Start]:
    """Start manage.py with these arguments; environment variables may be given by name."""
    stack = ExitStack()

    def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
        database = {
            "DJANGO_SETTINGS_MODULE": "sample_app.settings",
            "DATABASE_URL": empty_database,
            # A machine may stop for longer than the shop waits for an answer.
            "WAREHOUSE_ANSWER_WITHIN": str(PATIENCE),
        }
        process = subprocess.Popen(
            [sys.executable, str(MANAGE_PY), *map(str, arguments)],
            env={**os.environ, **database, **environment},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        return process

    with stack:
        yield start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for its end; return the exit code and what it said on stdout and stderr.

    A demo is many programs, one after another.
    """
    output, errors = process.communicate(timeout=4 * PATIENCE)
    return process.returncode, output, errors


@pytest.fixture
def look_at_orders(empty_database: str) -> LookAtOrders:
    """Tell of each order number whether it has shipped, and whether a mail has said so."""
    question = "SELECT number, shipped_at IS NOT NULL, shipped_email_sent FROM shop_order"

    def look() -> dict[int, tuple[bool, bool]]:
        with connect(empty_database) as connection, connection.cursor() as cursor:
            rows = cursor.execute(question).fetchall()
        return {number: (shipped, sent) for number, shipped, sent in rows}

    return look
