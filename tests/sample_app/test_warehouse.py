"""The warehouse: every order arrives, however flaky the way there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone
from httpx2 import AsyncClient, Timeout

from sample_app.shop.demo.warehouse_audit import audit
from sample_app.shop.demo.warehouse_stub import Mood, WarehouseStub
from sample_app.shop.models import Order, Payment
from sample_app.shop.processors import push_to_warehouse
from tests.sample_app.conftest import LoadOrders
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def warehouse(moods: Mapping[int, Mood] | None = None) -> Iterator[WarehouseStub]:
    """Run a warehouse, and have the shop use it."""
    with WarehouseStub(moods or {}) as stub, override_settings(WAREHOUSE_URL=stub.url):
        yield stub


@pytest.fixture
def load_paid(load_orders: LoadOrders) -> LoadOrders:
    """Load orders that are paid for."""

    def load(*numbers: int, **changes: bool) -> None:
        load_orders(*numbers, **changes)
        for payment in Payment.objects.select_related("order"):
            payment.state = Payment.State.CAPTURED
            payment.charge_id = f"ch_{payment.order.number}"
            payment.save()

    return load


def make_due() -> None:
    """Let the time pass that a failed order has to wait."""
    assert Order.objects.exclude(next_attempt_at=None).update(next_attempt_at=timezone.now())


def order(number: int) -> Order:
    return Order.objects.get(number=number)


class Impatient(AsyncClient):
    """Waits for no answer about order 7."""

    async def put(self, url: Any, **options: Any) -> Any:
        timeout = Timeout(PATIENCE, read=0.5 if url == "/orders/7" else PATIENCE)
        return await super().put(url, timeout=timeout, **options)


@pytest.mark.parametrize(
    ("mood", "arrivals", "error"),
    [
        (Mood.DOWN, 1, "HTTPStatusError"),
        (Mood.CONFUSED, 2, "HTTPStatusError"),
        (Mood.SILENT, 2, "ReadTimeout"),
    ],
)
def test_after_a_failed_answer_the_order_is_sent_again_and_packed_once(
    load_paid: LoadOrders, monkeypatch: pytest.MonkeyPatch, mood: Mood, arrivals: int, error: str
) -> None:
    load_paid(7, 8)
    with warehouse({7: mood}) as stub:
        with monkeypatch.context() as impatient:
            if mood is Mood.SILENT:
                impatient.setattr("httpx2.AsyncClient", Impatient)
            report = push_to_warehouse(concurrency=2)
        assert (report.processed, report.failed) == (1, 1)
        # Once the order 8, and the order 7 once less than in the end.
        until(lambda: len(stub.log) == arrivals, "what was sent to arrive")
        assert not order(7).in_warehouse
        assert order(7).last_error.startswith(error)
        assert push_to_warehouse().processed == 0
        make_due()
        assert push_to_warehouse().processed == 1
    assert Counter(arrival.order for arrival in stub.log) == {7: arrivals, 8: 1}
    assert stub.to_pack == {"7", "8"}
    assert (order(7).in_warehouse, order(7).attempts) == (True, 0)  # cleared by the success
    assert audit({7, 8}, stub.log).clean
