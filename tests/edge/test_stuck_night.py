"""The night of ``docs/howto/operate.md``: its commands in order, in processes of their own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest
from django.db.models import F
from django.utils import timezone

import dcl_processor.ledger as api
from dcl_processor.ledger.models import Record
from sample_app.shop.demo import payment_stub
from sample_app.shop.demo.http_stub import Answer, Request
from sample_app.shop.demo.payment_stub import Mood, PaymentStub
from sample_app.shop.models import Customer, Order, Payment
from tests.databases import environment
from tests.docs.blocks import EXIT_CODE, MANAGE, commands
from tests.docs.output import difference
from tests.environments import CHECKOUT
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = CHECKOUT / "docs/howto/operate.md"
TITLE = "\n## One night, from the alarm to the morning\n"

#: Shows the file that the operator has written.
FILE = "$ cat found.csv"

#: How long after the deaths the alarm is raised.
LATER = timedelta(hours=2)


class Gateway(PaymentStub):
    """Charges the first card and does not answer; does neither for the second one, at first."""

    def __init__(self) -> None:
        super().__init__({1: Mood.CHARGED_IN_SILENCE, 2: Mood.LOST})
        #: The process of the worker that asked last, by order.
        self.asked: dict[int, int] = {}

    def answer(self, request: Request) -> Answer | None:
        """Note whose request it is, and answer or not."""
        self.asked[request.body["order"]] = int(request.headers["User-Agent"].rpartition("/")[2])
        return super().answer(request)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """Run a gateway that stays silent for longer than the test lasts."""
    monkeypatch.setattr(payment_stub, "TOO_SLOW", PATIENCE)
    monkeypatch.setattr(payment_stub, "PAUSES", {Mood.CHARGED_IN_SILENCE: PATIENCE})
    with Gateway() as stub:
        yield stub


@pytest.fixture
def payments() -> None:
    """Make the payments 7 and 8, for the orders 1 and 2."""
    customer = Customer.objects.create(code="ANNA", company="Café Anna", email="anna@example.com")
    for number in (1, 2):
        order = Order.objects.create(
            number=number,
            customer=customer,
            order_date=date(2024, 5, 1),
            required_date=date(2024, 5, 29),
            shipped_at=timezone.now(),
            freight="7.50",
        )
        Payment.objects.create(pk=6 + number, order=order, amount="7.50")


def story() -> list[tuple[str, str]]:
    """Return the commands of the night, each with the output that the page shows."""
    section = PAGE.read_text(encoding="utf-8").partition(TITLE)[2].partition("\n## ")[0]
    blocks = re.findall(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [each for block in blocks for each in commands(block)]


def start(command: str, gateway: Gateway, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        shlex.split(command.replace(MANAGE, f"{sys.executable} -m django ")),
        env=environment(
            DJANGO_SETTINGS_MODULE="tests.edge.night_settings", PAYMENTS_URL=gateway.url
        ),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_both_workers(gateway: Gateway) -> None:
    """Kill each worker while it waits for the answer to its charge."""
    until(lambda: set(gateway.asked) == {1, 2}, "two charges")
    assert len(set(gateway.asked.values())) == 2
    for pid in gateway.asked.values():
        os.kill(pid, signal.SIGKILL)


def let_time_pass() -> None:
    for model, names in ((Payment, ["capturing_since"]), (Record, ["at", "seen_at"])):
        model._default_manager.update(**{name: F(name) - LATER for name in names})


def test_the_night_goes_as_the_page_tells_it(
    gateway: Gateway, payments: None, tmp_path: Path
) -> None:
    code, number = 0, 0
    lines = story()
    for (command, shown), (following, _) in zip(lines, [*lines[1:], ("", "")], strict=True):
        if command == EXIT_CODE:
            assert shown == f"{code}\n"
            continue
        number += 1
        if command == FILE:
            (tmp_path / "found.csv").write_text(shown, encoding="utf-8")
            continue
        assert command.startswith(f"{MANAGE}processors ")
        with start(command, gateway, tmp_path) as process:
            try:
                if number == 1:
                    kill_both_workers(gateway)
                output, _ = process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
        code = process.returncode
        if number == 1:  # both workers have died at once, and either may be seen first
            lines_of_it = output.splitlines(keepends=True)
            output = "".join(sorted(lines_of_it, key=lambda line: (line[:1] == "C", line)))
        assert difference(shown, output) is None, f"{command}: {difference(shown, output)}"
        # The page does not keep silent about an error.
        assert code == 0 or following == EXIT_CODE, command
        if number == 1:
            let_time_pass()
    assert number == 11
    # Each card was charged once.
    assert [(charge.order, charge.charge_id) for charge in gateway.log] == [
        (1, "ch_1_1"),
        (2, "ch_2_2"),
    ]
    columns = ("pk", "state", "charge_id", "capturing_since", "last_error")
    assert list(Payment.objects.order_by("pk").values_list(*columns)) == [
        (7, "captured", "ch_1_1", None, ""),
        (8, "captured", "ch_2_2", None, ""),
    ]
    assert api.state("shop.capture_payments").pause is None
