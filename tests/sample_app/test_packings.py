"""Robots pull packings over HTTP, and report their weight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import Client, override_settings

from sample_app.shop.models import Order, Packing, Robot
from sample_app.shop.packing import MOST_HELD, held_by
from sample_app.shop.packing_views import NO_ROOM
from tests.sample_app.conftest import LoadOrders
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = {"one": "secret", "two": "other"}


@pytest.fixture(autouse=True)
def keys() -> Iterator[None]:
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


def pull(robot: str = "one") -> str:
    status, answer = call(robot, "pull")
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


def test_a_broken_robot_does_not_take_all_packings(packings: list[Packing]) -> None:
    tokens = [pull() for _ in range(MOST_HELD)]
    assert call("one", "pull")[1]["packings"] == []
    pull("two")
    call("one", "fail", token=tokens[0], reason="no box")
    failed = Packing.objects.get(pk=packings[0].pk)
    assert (failed.state, failed.last_error, failed.attempts) == (
        *("waiting", "RobotError: no box"),
        1,
    )
    pull()


def pull_in_a_thread(robot: str) -> Any:
    try:
        return call(robot, "pull")[1]
    finally:
        connections.close_all()


def assert_one_was_handed_out(answers: list[Any], packings: list[Packing]) -> None:
    """Check that of two requests one got the last packing that the robot may hold."""
    handed, refused = sorted(answers, key=lambda answer: "error" in answer)
    assert len(handed["packings"]) == 1
    assert refused == NO_ROOM
    assert held_by("one").count() == MOST_HELD
    # What was too much waits as before, without an attempt.
    waiting = Packing.objects.filter(state="waiting", packer="", attempts=0, leased_until=None)
    assert waiting.count() == len(packings) - MOST_HELD


def test_two_requests_that_have_both_reserved_are_counted_one_after_the_other(
    packings: list[Packing],
) -> None:
    """Both wait for the robot's row before either is confirmed."""
    for _ in range(MOST_HELD - 1):
        pull()

    def both_wait() -> bool:
        with connection.cursor() as cursor:
            # In a transaction, the first answer would be given again.
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return bool(cursor.fetchone()[0] == 2)

    with ThreadPoolExecutor(2) as pool:
        with transaction.atomic():
            Robot.objects.select_for_update().get(name="one")
            answers = pool.map(pull_in_a_thread, ["one", "one"])
            until(both_wait, "both requests to wait for the robot's row")
        assert_one_was_handed_out([*answers], packings)
