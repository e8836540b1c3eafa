"""The demo: four copies race, and every due order gets one mail."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sample_app.shop.demo.invented_orders import FIRST_NUMBER
from sample_app.shop.demo.invented_orders import ORDERS as INVENTED
from tests.sample_app.conftest import ORDERS, SHIPPED, LookAtOrders, Start, connect, ended

SHARE = re.compile(r"^ +([1-4]) +([0-9,]+) +0 +[0-9.]+$", re.MULTILINE)


def test_sends_every_mail_once_and_nothing_when_run_again(
    start: Start, order_file: Path, look_at_orders: LookAtOrders
) -> None:
    code, output, errors = ended(start("demo", "--orders", order_file))

    assert (code, errors) == (0, "")
    assert (
        "809 due, 809 mails delivered, 0 duplicates, 0 missing; 21 of 21 unshipped orders untouched"
    ) in output
    shares = {copy: int(sent) for copy, sent in SHARE.findall(output)}
    assert shares.keys() == {"1", "2", "3", "4"}
    assert sum(shares.values()) == SHIPPED
    orders = look_at_orders()
    assert len(orders) == ORDERS
    assert all(shipped == sent for shipped, sent in orders.values())

    code, output, errors = ended(start("demo", "--orders", order_file))

    assert (code, errors) == (0, "")
    assert "0 loaded, 830 already there, 0 bad lines skipped" in output
    assert "0 due, 0 mails delivered, 0 duplicates, 0 missing; 21 of 21" in output
    assert look_at_orders() == orders


def test_invents_new_orders_on_every_run_when_given_none(
    start: Start, look_at_orders: LookAtOrders
) -> None:
    for run in (1, 2):
        code, output, errors = ended(start("demo", "--copies", "2"))

        assert (code, errors) == (0, "")
        assert "0 duplicates, 0 missing" in output
        orders = look_at_orders()
        assert orders.keys() == set(range(FIRST_NUMBER, FIRST_NUMBER + run * INVENTED))
        assert all(shipped == sent for shipped, sent in orders.values())
        assert 0 < sum(sent for _, sent in orders.values()) < len(orders)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes started here take SIGINT even where this one was told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_copies_too(start: Start, empty_database: str) -> None:
    demo = start("demo")
    assert demo.stdout is not None
    assert any("local server" in line for line in demo.stdout)

    demo.send_signal(signal.SIGINT)
    code, _, errors = ended(demo)

    assert (code, errors) == (130, "Interrupted.\n")
    assert connections_left(empty_database) == 0


def connections_left(url: str, within: float = 10) -> int:
    """Return how many clients the database still has, once there are none or time is up."""
    question = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    deadline = time.monotonic() + within
    with connect(url) as connection:
        while True:
            [left] = connection.execute(question).fetchone() or [0]
            if not left or time.monotonic() > deadline:
                return int(left)
            time.sleep(0.05)
