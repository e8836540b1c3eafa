"""Order files, a mail server, and an empty database for commands run as processes."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from django.core.management import call_command
from django.test import override_settings

from dcl_processor import Lease
from sample_app.embedded import database_url
from sample_app.mail_settings import smtp_settings
from sample_app.shop import payment_gateway, warehouse
from sample_app.shop.demo import payment_stub, warehouse_stub
from sample_app.shop.demo.mailbox import HOST, Mailbox
from sample_app.shop.demo.workers import MANAGE_PY
from sample_app.shop.orders_csv import COLUMNS
from sample_app.shop.packing import pack_orders
from sample_app.shop.processors import capture_payments, push_to_warehouse
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

    def write(*lines: str, header: str = ",".join(COLUMNS)) -> Path:
        path = tmp_path / "orders.csv"
        path.write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def load_orders(write_orders: WriteOrders) -> LoadOrders:
    """Load orders of these numbers, with a payment and an invoice each."""

    def load(*numbers: int, unshipped: Sequence[int] = (), invent_lines: bool = False) -> None:
        lines = (
            order_line(number, **({"shipped_date": ""} if number in unshipped else {}))
            for number in numbers
        )
        path = write_orders(*lines)
        call_command("load_orders", str(path), invent_lines=invent_lines, stdout=io.StringIO())

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


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the shop wait for an answer, and for its next attempt, longer than a machine may stop.

    Who is not to answer at all stays silent until the stub is closed.
    """
    for room in (payment_gateway, warehouse):
        monkeypatch.setattr(room, "ANSWER_WITHIN", PATIENCE)
    for stub in (payment_stub, warehouse_stub):
        monkeypatch.setattr(stub, "TOO_SLOW", PATIENCE)
    pauses = {payment_stub.Mood.CHARGED_IN_SILENCE: PATIENCE}
    monkeypatch.setattr(payment_stub, "PAUSES", payment_stub.PAUSES | pauses)
    for processor in (capture_payments, push_to_warehouse, pack_orders):
        assert processor.retry
        monkeypatch.setattr(processor, "retry", replace(processor.retry, backoff=PATIENCE))
    for leased in (push_to_warehouse, pack_orders):
        monkeypatch.setattr(leased, "lease", Lease(600))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Give a port that refuses, and that no other program can get: bound, and not listened at."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """Run a real SMTP server, and have Django send its mail there."""
    with Mailbox() as box, override_settings(**smtp_settings(HOST, box.port)):
        yield box


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
            # As for this process, see no_hurry().
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
