"""The demo: four workers of each processor race, and what each promises is kept."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from sample_app.shop.demo.invented_orders import FIRST_NUMBER
from sample_app.shop.demo.invented_orders import ORDERS as INVENTED
from tests.edge.conftest import interrupts  # noqa: F401  # a fixture
from tests.sample_app.conftest import ORDERS, SHIPPED, LookAtOrders, Start, ended
from tests.servers.scratch import connect
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(9 * PATIENCE)

SHARES = re.compile(r"^  workers +([0-9,+ ]+) rows in [0-9.]+ s$", re.MULTILINE)
ALL_WELL = "All is well"
STAGES = 3


def figures(output: str, ending: str) -> str:
    """Return the line of figures of the audit that ends like this."""
    lines = output.splitlines()
    [line] = [line for line in lines if line[:1].isdigit() and line.endswith(ending)]
    return line


def test_sends_every_mail_once_and_nothing_when_run_again(
    start: Start, order_file: Path, look_at_orders: LookAtOrders
) -> None:
    code, output, errors = ended(start("demo", "--orders", order_file))

    assert (code, errors) == (0, "")
    assert output.count(ALL_WELL) == STAGES
    assert (
        "809 due, 809 mails delivered, 0 duplicates, 0 missing; 21 of 21 unshipped orders untouched"
    ) in output
    mails = SHARES.search(output)
    assert mails is not None
    assert sum(map(int, mails[1].split(" + "))) == SHIPPED
    assert len(mails[1].split(" + ")) == 4
    [sessions] = re.findall(r"809 mails in ([0-9]+) SMTP sessions", output)
    assert 1 <= int(sessions) <= 4
    orders = look_at_orders()
    assert len(orders) == ORDERS
    assert all(shipped == sent for shipped, sent in orders.values())

    code, output, errors = ended(start("demo", "--orders", order_file))

    assert (code, errors) == (0, "")
    assert "0 loaded, 830 already there, 0 bad lines skipped" in output
    assert "0 due, 0 mails delivered, 0 duplicates, 0 missing; 21 of 21" in output
    assert "0 due, 0 charged once" in output
    assert "kill -9" not in output
    assert "0 due, 0 arrived" in output
    assert output.count(ALL_WELL) == STAGES
    assert look_at_orders() == orders


def invented(run: int, look_at_orders: LookAtOrders) -> None:
    """Check that each run has invented orders of its own, and that all mails are sent."""
    orders = look_at_orders()
    assert orders.keys() == set(range(FIRST_NUMBER, FIRST_NUMBER + run * INVENTED))
    assert all(shipped == sent for shipped, sent in orders.values())
    assert 0 < sum(sent for _, sent in orders.values()) < len(orders)


def test_each_delivery_keeps_its_promise_though_a_copy_is_killed(
    start: Start, empty_database: str, look_at_orders: LookAtOrders
) -> None:
    """For orders that are invented, other ones in each demo."""
    code, output, errors = ended(start("demo"))

    assert (code, errors) == (0, "")
    assert output.count(ALL_WELL) == STAGES
    assert output.count("kill -9") == 1
    due, charged, twice, refused, doubtful, stored = numbers(
        figures(output, "as in the gateway's log")
    )
    assert (charged + refused, twice, doubtful, stored) == (due, 0, 0, charged)
    assert refused > 0
    # The one that was killed, one whose answer came too late, and one that was never charged; on a
    # slow machine there may be others.
    doubts = re.findall(r"^  doubt +order (.*)$", output, re.MULTILINE)
    assert sum("marked done" in doubt for doubt in doubts) >= 2
    assert any("never charged: due again" in doubt for doubt in doubts)
    arrived = numbers(figures(output, "to be packed"))
    assert arrived[:3] == [charged, charged, 0]
    assert arrived[4] == charged
    assert arrived[3] > 0
    with connect(empty_database) as connection:
        in_the_table = connection.execute(
            "SELECT count(*) FILTER (WHERE state = 'captured'), count(DISTINCT charge_id)"
            " FILTER (WHERE charge_id <> ''), count(*) FILTER (WHERE state = 'capturing')"
            " FROM shop_payment"
        ).fetchone()
    assert in_the_table == (charged, charged, 0)
    invented(1, look_at_orders)

    code, output, errors = ended(start("demo", "--workers", "2"))

    assert (code, errors) == (0, "")
    assert "0 duplicates, 0 missing" in output
    invented(2, look_at_orders)


def numbers(line: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[0-9][0-9,]*", line)]


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_copies_too(start: Start, empty_database: str) -> None:
    demo = start("demo")
    assert demo.stdout is not None
    assert any("local server" in line for line in demo.stdout)

    demo.send_signal(signal.SIGINT)
    code, _, errors = ended(demo)

    assert (code, errors) == (130, "Interrupted.\n")
    until(lambda: connections_left(empty_database) == 0, "the workers to leave the database")


def connections_left(url: str) -> int:
    question = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with connect(url) as connection:
        [left] = connection.execute(question).fetchone() or [0]
        return int(left)
