"""Rows of several claims under way on one event loop: no row waits for another one's batch."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.contract.support import errands as the
from tests.contract.support.errands import Make, each_delivery
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


class Straggler:
    """Keeps the first row's handler until so many others have been called."""

    def __init__(self, others: int) -> None:
        self.left = others
        self.may_end = asyncio.Event()

    async def __call__(self, row: Errand) -> None:
        if row.place == 0:
            async with asyncio.timeout(the.PATIENCE):
                await self.may_end.wait()
        else:
            self.left -= 1
            if not self.left:
                self.may_end.set()


@each_delivery
@pytest.mark.parametrize("concurrency", [2, 4, 10])
def test_a_slow_handler_does_not_keep_rows_from_being_claimed(make: Make, concurrency: int) -> None:
    the.errands(30)
    straggler = Straggler(29)

    async def handle(row: Errand) -> None:
        await straggler(row)

    report = make(handle).run(concurrency=concurrency)
    assert_run(report, processed=30)
    assert Errand.objects.filter(done=True, leased_until=None).count() == 30


@each_delivery
def test_a_slow_handler_does_not_keep_the_rest_of_its_batch_waiting(make: Make) -> None:
    """Fewer handlers at once than a claim takes rows."""
    the.errands(30)
    straggler = Straggler(29)

    async def handle(row: Errand) -> None:
        await straggler(row)

    assert_run(make(handle, batch_size=12).run(concurrency=2), processed=30)


@each_delivery
def test_no_more_are_in_flight_and_no_more_are_claimed_than_asked_for(make: Make) -> None:
    the.errands(40)
    claimed: list[int] = []
    now: set[int] = set()

    async def handle(row: Errand) -> None:
        now.add(row.pk)
        assert len(now) <= 4
        # Some end at once and some a little later, so that batches mix.
        for _ in range(row.place % 7):
            await asyncio.sleep(0.001)
        now.discard(row.pk)

    def done(row: Errand, result: None) -> dict[str, Any]:
        held = Errand.objects.filter(done=False)
        mark = "claimed_at" if make is the.at_most_once else "leased_until"
        claimed.append(held.exclude(**{mark: None}).count())
        return {"done": True}

    report = make(handle, batch_size=6, done=done).run(concurrency=4)
    assert_run(report, processed=40)
    # Those whose handlers have ended, and that are just being settled, besides.
    assert max(claimed) <= 2 * 6


@each_delivery
def test_rows_are_not_claimed_one_by_one(make: Make) -> None:
    """Handlers that end one after the other, as they do under way, make no claim each."""
    the.errands(40)
    tickets = iter(range(1, 1000))

    async def handle(row: Errand) -> None:
        turn = next(tickets)
        for _ in range(turn % 9):
            await asyncio.sleep(0)

    processor = make(handle)
    with CaptureQueriesContext(connection) as queries:
        assert_run(processor.run(concurrency=8), processed=40)
    locks = [
        each["sql"]
        for each in queries
        if "SKIP LOCKED" in each["sql"] or each["sql"].startswith("BEGIN")
    ]
    # 8 rows first, and then two at least, where one by one would make more than 40.
    assert 0 < len(locks) < 3 * (1 + (40 - 8) // 2)


@each_delivery
def test_a_limit_counts_what_is_under_way(make: Make) -> None:
    the.errands(20)
    straggler = Straggler(10)

    async def handle(row: Errand) -> None:
        await straggler(row)

    report = make(handle).run(concurrency=4, limit=11)
    assert_run(report, processed=11, stopped="limit")
    assert Errand.objects.filter(done=True).count() == 11
    assert all(the.untouched(row) for row in Errand.objects.filter(done=False))


def test_an_interrupt_cancels_the_handlers_of_all_batches(interrupt: Any) -> None:
    rows = the.errands(12)
    cancelled: list[int] = []
    waiting: list[int] = []

    async def handle(row: Errand) -> None:
        if row.place % 3:
            return
        waiting.append(row.place)
        if len(waiting) == 3:
            interrupt()
        try:
            await asyncio.sleep(the.PATIENCE)
        except asyncio.CancelledError:
            # One that tidies up is left in peace.
            await asyncio.sleep(0.01)
            cancelled.append(row.place)
            raise

    with pytest.raises(KeyboardInterrupt):
        the.at_least_once(handle, retry=the.retry()).run(concurrency=4)
    assert waiting[:3] == [0, 3, 6]
    assert sorted(cancelled) == sorted(waiting)
    states = [the.state(row) for row in rows]
    for row, state in zip(rows, states, strict=True):
        assert state["done"] or the.untouched(row), state
    assert not any(states[place]["done"] for place in waiting)
    assert {states[place]["done"] for place in (1, 2, 4, 5)} == {True}


@each_delivery
def test_an_interrupt_in_a_handler_cancels_those_of_other_batches(make: Make) -> None:
    rows = the.errands(8)

    async def handle(row: Errand) -> None:
        if row.place == 0:
            await asyncio.sleep(the.PATIENCE)
        elif row.place == 5:
            raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        make(handle).run(concurrency=2)
    states = [the.state(row) for row in rows]
    assert [state["done"] for state in states] == [0, 1, 1, 1, 1, 0, 0, 0]
    # Started, and neither done nor failed: free again, or in doubt.
    assert {states[place]["claimed"] for place in (0, 5)} == {make is the.at_most_once}
    assert the.untouched(rows[6])
    assert the.untouched(rows[7])


class Shop:
    """A resource that tells how many handlers have it when it is closed."""

    def __init__(self) -> None:
        self.opened = 0
        self.users: dict[str, int] = {}
        self.closed: list[str] = []
        self.in_use_when_closed: list[int] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self.opened += 1
        name = f"shop {self.opened}"
        self.users[name] = 0
        yield name
        self.closed.append(name)
        self.in_use_when_closed.append(self.users[name])

    async def use(self, name: str, work: Awaitable[Any]) -> None:
        self.users[name] += 1
        try:
            await work
        finally:
            self.users[name] -= 1


@each_delivery
def test_a_worn_resource_is_closed_when_nobody_has_it_any_more(make: Make) -> None:
    the.errands(12)
    shop = Shop()
    straggler = Straggler(11)
    given: dict[int, str] = {}

    async def work(row: Errand) -> None:
        await straggler(row)
        if row.place == 1:
            raise ValueError("the line was dead")

    async def handle(row: Errand, resource: str) -> None:
        assert resource not in shop.closed
        given[row.place] = resource
        await shop.use(resource, work(row))

    report = make(handle, resource=shop.open, failed={"dead": True}).run(concurrency=2)
    assert_run(report, processed=11, failed=1)
    # The straggler keeps what it was given, and all others go on with a new one meanwhile.
    assert given == {0: "shop 1", 1: "shop 1", **dict.fromkeys(range(2, 12), "shop 2")}
    assert sorted(shop.closed) == ["shop 1", "shop 2"]
    assert shop.in_use_when_closed == [0, 0]


class Result:
    """What a handler returned, which can be seen to be forgotten."""


@each_delivery
def test_i8_what_a_handler_returned_is_forgotten_once_its_row_is_settled(make: Make) -> None:
    the.errands(40)
    kept: weakref.WeakSet[Result] = weakref.WeakSet()
    most: list[int] = []

    async def handle(row: Errand) -> Result:
        most.append(len(kept))
        result = Result()
        kept.add(result)
        return result

    report = make(handle, batch_size=2).run(concurrency=2)
    assert_run(report, processed=40)
    assert max(most) <= 10
