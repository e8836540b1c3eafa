"""Payments: no card is charged twice, against a gateway that answers as gateways do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal

import pytest
from django.db import connection
from django.test import override_settings
from httpx2 import Timeout

from dcl_processor import Delivery
from sample_app.shop import payment_gateway
from sample_app.shop.demo.payment_audit import audit
from sample_app.shop.demo.payment_stub import Charge, Mood, PaymentStub
from sample_app.shop.demo.workers import MANAGE_PY
from sample_app.shop.doubts import Answer, resolve_doubts
from sample_app.shop.models import Payment
from sample_app.shop.payment_gateway import open_gateway
from sample_app.shop.processors import capture_payments
from tests.edge.manage import environment
from tests.sample_app.conftest import LoadOrders
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

State = Payment.State


@contextmanager
def gateway(
    moods: Mapping[int, Mood] | None = None, *, holding: int | None = None
) -> Iterator[PaymentStub]:
    """Run a gateway, and have the shop use it."""
    with (
        PaymentStub(moods or {}, holding=holding) as stub,
        override_settings(PAYMENTS_URL=stub.url),
    ):
        yield stub


def payment(order: int) -> Payment:
    return Payment.objects.get(order__number=order)


def resolve(stub: PaymentStub) -> list[Answer]:
    with open_gateway(stub.url) as opened:
        return list(resolve_doubts(opened, older_than=0))


def test_charges_each_card_once_and_stores_the_gateways_name_of_the_charge(
    load_orders: LoadOrders,
) -> None:
    load_orders(7, 8, 9)
    with gateway() as stub:
        report = capture_payments()
        again = capture_payments()
    assert capture_payments.delivery is Delivery.AT_MOST_ONCE
    assert (report.processed, again.processed) == (3, 0)
    assert stub.log == [Charge(payment(number).charge_id, number, "32.38") for number in (7, 8, 9)]
    assert {p.state for p in Payment.objects.all()} == {State.CAPTURED}
    assert not Payment.objects.exclude(capturing_since=None).exists()


def test_the_row_is_claimed_and_committed_before_the_card_is_charged(
    load_orders: LoadOrders,
) -> None:
    seen = []

    class Watching(PaymentStub):
        """Looks into the table, on a connection of its own, when it is asked to charge."""

        def answer(self, request):  # type: ignore[no-untyped-def]
            row = payment(request.body["order"])
            seen.append((row.state, row.capturing_since is not None, row.charge_id))
            connection.close()
            return super().answer(request)

    load_orders(7)
    with Watching({}) as stub, override_settings(PAYMENTS_URL=stub.url):
        assert capture_payments().processed == 1
    assert seen == [(State.CAPTURING, True, "")]


@pytest.mark.parametrize(("mood", "charged"), [(Mood.CHARGED_IN_SILENCE, True), (Mood.LOST, False)])
def test_no_answer_leaves_the_payment_in_doubt_until_the_gateway_was_asked(
    load_orders: LoadOrders, monkeypatch: pytest.MonkeyPatch, mood: Mood, charged: bool
) -> None:
    load_orders(7)
    with gateway({7: mood}) as stub:
        with monkeypatch.context() as impatient:
            impatient.setattr(payment_gateway, "ANSWER_WITHIN", Timeout(PATIENCE, read=0.5))
            assert capture_payments().failed == 1
        until(lambda: stub.log if charged else not stub._moods, "the request to arrive")
        row = payment(7)
        assert row.state == State.CAPTURING
        assert row.capturing_since is not None
        assert list(capture_payments.in_doubt(older_than=0)) == [row]
        assert not capture_payments.in_doubt(older_than=60).exists()
        # It is not charged again as long as its charge is not known.
        assert capture_payments().processed == 0

        [answer] = resolve(stub)

        assert (answer.order, answer.amount) == (7, Decimal("32.38"))
        assert (answer.charge_id is not None) == charged
        assert not capture_payments.in_doubt(older_than=0).exists()
        assert capture_payments().processed == (0 if charged else 1)
    assert [charge.order for charge in stub.log] == [7]
    row = payment(7)
    assert (row.state, row.charge_id) == (State.CAPTURED, stub.log[0].charge_id)
    assert row.capturing_since is None


def test_a_copy_that_is_killed_leaves_one_payment_in_doubt_and_costs_no_other(
    load_orders: LoadOrders,
) -> None:
    load_orders(7, 8, 9)
    with gateway(holding=2) as stub:
        settings = "tests.sample_app.patient_settings"
        variables = environment(PAYMENTS_URL=stub.url, DJANGO_SETTINGS_MODULE=settings)
        command = [sys.executable, str(MANAGE_PY), "processors", "run", capture_payments.name]
        with subprocess.Popen(command, env=variables) as process:
            assert until(lambda: stub.held, "a process that is charging") == process.pid
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)
            stub.let_go()
        assert [row.order.number for row in capture_payments.in_doubt(older_than=0)] == [8]

        assert capture_payments().processed == 1
        [answer] = resolve(stub)

        assert answer.charge_id == stub.log[1].charge_id
    assert [charge.order for charge in stub.log] == [7, 8, 9]
    verdict = audit([7, 8, 9], stub.log)
    assert verdict.clean
    assert verdict.figures == (
        "3 due, 3 charged once, 0 charged twice, 0 refused, 0 in doubt; "
        "3 charge ids stored as in the gateway's log"
    )
