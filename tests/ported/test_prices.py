"""Prices that one call outside any transaction changes together, with an answer for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone

from dcl_processor import Lease
from dcl_processor.testing import race
from tests.contract.support import errands as the
from tests.ported import outside
from tests.ported.as_processor.prices import PushPrices, push_prices
from tests.ported.by_hand import prices
from tests.ported.models import Price
from tests.ported.workers import renewed, together

pytestmark = pytest.mark.django_db(transaction=True)

Answers = list[str | None]

each_way = pytest.mark.parametrize(
    "loop", [prices.push_prices, push_prices], ids=["by hand", "as a processor"]
)


@pytest.fixture(autouse=True)
def two_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prices, "TOGETHER", 2)
    monkeypatch.setattr(push_prices, "batch_size", 2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Keep the calls; the shop refuses amounts that are not above 0."""
    calls: list[list[str]] = []

    def mutate(changes: Sequence[tuple[str, int]]) -> Answers:
        calls.append([sku for sku, _ in changes])
        return [None if amount > 0 else "must be above 0" for _, amount in changes]

    monkeypatch.setattr(outside, "mutate", mutate)
    return calls


def add(*amounts: int, **values: Any) -> None:
    Price.objects.bulk_create(
        Price(sku=f"{number}", amount=amount, **values) for number, amount in enumerate(amounts)
    )


def states() -> dict[str, str]:
    return dict(Price.objects.values_list("sku", "state"))


@each_way
def test_each_price_has_a_result_of_its_own(
    loop: Callable[[], Any], calls: list[list[str]]
) -> None:
    add(5, 0, 7)
    loop()
    assert calls == [["0", "1"], ["2"]]
    assert states() == {"0": "shown", "1": "new", "2": "shown"}
    for _ in range(3):
        Price.objects.update(next_attempt_at=None)
        loop()
    refused = Price.objects.get(sku="1")
    assert (refused.state, refused.attempts, refused.leased_until) == ("refused", 3, None)
    assert "must be above 0" in refused.last_error
    assert calls[2:] == [["1"], ["1"]]


@each_way
def test_a_call_that_fails_costs_each_price_one_attempt(loop: Callable[[], Any]) -> None:
    """The processor tries each price alone before; that is no attempt of its own."""
    add(1, 1, 1)
    loop()
    assert set(Price.objects.values_list("state", "attempts", "leased_until")) == {("new", 1, None)}
    assert all("ConnectionError" in each.last_error for each in Price.objects.all())
    assert not Price.objects.filter(next_attempt_at=None).exists()


@each_way
def test_no_transaction_is_open_and_no_price_is_locked_during_a_call(
    loop: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(1, 2)
    seen: list[tuple[bool, int]] = []

    def lock_all() -> int:
        with transaction.atomic():
            return len(Price.objects.select_for_update(nowait=True))

    def mutate(changes: Sequence[tuple[str, int]]) -> Answers:
        seen.append((connection.in_atomic_block, the.elsewhere(lock_all)))
        return [None] * len(changes)

    monkeypatch.setattr(outside, "mutate", mutate)
    loop()
    assert seen == [(False, 2)]


@each_way
def test_workers_together_push_each_price_once(
    loop: Callable[[], Any], calls: list[list[str]]
) -> None:
    add(*[1] * 20)
    together(loop)
    pushed = [sku for call in calls for sku in call]
    assert sorted(pushed, key=int) == [f"{number}" for number in range(20)]
    assert set(states().values()) == {"shown"}
    assert max(map(len, calls)) == 2


def test_in_a_race_of_processors_each_price_is_pushed_once(calls: list[list[str]]) -> None:
    add(1, 2, 3)
    race(push_prices, copies=3).raise_for_failures()
    assert sorted(sku for call in calls for sku in call) == ["0", "1", "2"]


def test_by_hand_a_slow_call_is_made_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does not renew its lease, so the next worker takes the prices over."""
    monkeypatch.setattr(prices, "LEASE", timedelta(microseconds=1))
    assert during_a_call(monkeypatch, prices.push_prices, prices.push_prices) == [["0"], ["0"]]


def test_a_processor_renews_the_lease_during_a_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = PushPrices(lease=Lease(6))

    def when_renewed() -> None:
        renewed(Price.objects.get())
        assert slow().processed == 0

    assert during_a_call(monkeypatch, slow, when_renewed) == [["0"]]
    assert states() == {"0": "shown"}


def during_a_call(
    monkeypatch: pytest.MonkeyPatch, loop: Callable[[], Any], second: Callable[[], Any]
) -> list[list[str]]:
    """Run the second loop while the first one calls the shop; return the calls until then."""
    add(1)
    here, go_on = Event(), Event()
    calls: list[list[str]] = []

    def mutate(changes: Sequence[tuple[str, int]]) -> Answers:
        calls.append([sku for sku, _ in changes])
        if len(calls) == 1:
            here.set()
            the.wait(go_on)
        return [None] * len(changes)

    monkeypatch.setattr(outside, "mutate", mutate)
    with the.meanwhile(loop):
        try:
            the.wait(here)
            second()
            until_then = list(calls)
        finally:
            go_on.set()
    return until_then


def died_in_the_last_attempt() -> None:
    add(1, attempts=3, leased_until=timezone.now() - timedelta(hours=1))


def test_by_hand_a_price_whose_worker_died_in_its_last_attempt_is_lost(
    calls: list[list[str]],
) -> None:
    """It is neither pushed nor refused, and no page shows it."""
    died_in_the_last_attempt()
    prices.push_prices()
    assert (states(), calls) == ({"0": "new"}, [])


def test_a_processor_gives_up_a_price_whose_worker_died_in_its_last_attempt(
    calls: list[list[str]],
) -> None:
    died_in_the_last_attempt()
    assert push_prices().failed == 1
    assert (states(), calls) == ({"0": "refused"}, [])
