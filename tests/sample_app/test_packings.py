"""Robots pull packings over HTTP, and report their weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client, override_settings

from dcl_processor import Lease
from sample_app.shop.models import Order, Packing
from sample_app.shop.packing import pack_orders
from tests.sample_app.conftest import LoadOrders

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = {"one": "secret", "two": "other"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pack_orders, "lease", Lease(600))  # a machine may stop for a while
    with override_settings(ROBOT_KEYS=KEYS):
        yield


@pytest.fixture
def packings(load_orders: LoadOrders) -> list[Packing]:
    load_orders(*range(1, 6))
    return Packing.objects.bulk_create(Packing(order=order) for order in Order.objects.all())


def call(robot: str, method: str, **body: Any) -> tuple[int, Any]:
    answer = Client(headers={"Authorization": f"Robot {robot}:{KEYS.get(robot)}"}).post(
        f"/packings/{method}", body, content_type="application/json"
    )
    return answer.status_code, answer.json()


def pull() -> str:
    status, answer = call("one", "pull")
    assert status == 200
    [packing] = answer["packings"]
    token: str = packing["token"]
    return token


def test_a_packing_is_pulled_kept_and_settled(packings: list[Packing]) -> None:
    token = pull()
    held = Packing.objects.get(pk=packings[0].pk)
    assert (held.state, held.packer) == ("packing", "one")
    assert call("one", "renew", token=token)[0] == 200
    assert call("one", "settle", token=token, grams=700) == (200, {"state": "packed"})
    packed = Packing.objects.get(pk=held.pk)
    assert (packed.state, packed.grams, packed.packer) == ("packed", 700, "one")
    assert (packed.packing_since, packed.leased_until) == (None, None)
    # The same call again, because its answer was lost.
    assert call("one", "settle", token=token, grams=700) == (200, {"error": "settled"})


def test_a_token_is_of_no_use_to_another_robot(packings: list[Packing]) -> None:
    token = pull()
    invalid = (400, {"error": "invalid token"})
    assert call("two", "settle", token=token, grams=7) == invalid
    assert call("one", "settle", token=f"{token}x", grams=7) == invalid
    assert call("one", "settle", token=3, grams=7) == invalid
    assert call("three", "pull") == (401, {"error": "unknown robot"})
    assert call("one", "settle", token=token)[0] == 400
    assert call("one", "settle", token=token, grams="much")[0] == 400
    assert Packing.objects.get(pk=packings[0].pk).state == "packing"
