"""Payments: no card is charged twice, against a gateway that answers as gateways do."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.test import override_settings
from httpx2 import Timeout

from sample_app.shop import payment_gateway
from sample_app.shop.demo.payment_stub import Mood, PaymentStub
from sample_app.shop.doubts import resolve_doubts
from sample_app.shop.models import Payment
from sample_app.shop.payment_gateway import open_gateway
from sample_app.shop.processors import capture_payments
from tests.sample_app.conftest import LoadOrders
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)

State = Payment.State


def payment(order: int) -> Payment:
    return Payment.objects.get(order__number=order)


@pytest.mark.parametrize(("mood", "charged"), [(Mood.CHARGED_IN_SILENCE, True), (Mood.LOST, False)])
def test_no_answer_leaves_the_payment_in_doubt_until_the_gateway_was_asked(
    load_orders: LoadOrders, monkeypatch: pytest.MonkeyPatch, mood: Mood, charged: bool
) -> None:
    load_orders(7)
    with PaymentStub({7: mood}) as stub, override_settings(PAYMENTS_URL=stub.url):
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

        with open_gateway(stub.url) as opened:
            [answer] = resolve_doubts(opened, older_than=0)

        assert (answer.order, answer.amount) == (7, Decimal("32.38"))
        assert (answer.charge_id is not None) == charged
        assert not capture_payments.in_doubt(older_than=0).exists()
        assert capture_payments().processed == (0 if charged else 1)
    assert [charge.order for charge in stub.log] == [7]
    row = payment(7)
    assert (row.state, row.charge_id) == (State.CAPTURED, stub.log[0].charge_id)
    assert row.capturing_since is None
