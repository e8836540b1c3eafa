"""Asynchronous handlers: many in flight on one loop, claimed and settled by the run's thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from dcl_processor.exceptions import InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand
from tests.waiting import until

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


async def leave() -> None:
    sys.exit(2)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise ValueError("and went on")


@the.each_delivery
@pytest.mark.parametrize("end", [leave, stop_the_loop])
def test_a_handler_that_ends_the_loop_has_failed_and_the_others_go_on(
    make: the.Make, end: Any
) -> None:
    rows = the.errands(5)
    at_work = asyncio.Event()

    async def handle(row: Errand) -> None:
        if row.place == 1:
            await at_work.wait()
            await end()
        at_work.set()
        await asyncio.sleep(0.05)

    report = make(handle, batch_size=2)(concurrency=2)
    assert_run(report, processed=4, failed=1)
    assert report.failures[0].pk == rows[1].pk
    assert [the.state(row)["done"] for row in rows] == [True, False, True, True, True]


def test_an_interrupt_cancels_the_handlers_and_puts_back_the_rows_that_were_not_started(
    interrupt: Any,
) -> None:
    rows = the.errands(5)
    cancelled: list[Any] = []

    async def handle(row: Errand) -> None:
        if row.place == 1:
            interrupt()
        try:
            await asyncio.sleep(the.PATIENCE)
        except asyncio.CancelledError:
            cancelled.append(row.pk)
            raise

    with pytest.raises(KeyboardInterrupt):
        the.at_least_once(handle, batch_size=5, retry=the.retry())(concurrency=2)
    assert sorted(cancelled) == [row.pk for row in rows[:2]]
    # As if the process had been killed: their leases lapse.
    assert all(the.state(row)["leased_until"] for row in rows[:2])
    assert all(the.untouched(row) for row in rows[2:])


@the.each_delivery
def test_a_free_place_is_filled_while_all_the_others_are_at_work(make: the.Make) -> None:
    """The first handler ends alone; the others stay until a ninth one has been started."""
    the.errands(9)
    eight, ninth = asyncio.Barrier(8), asyncio.Event()

    async def handle(row: Errand) -> None:
        if row.place == 8:
            ninth.set()
            return
        async with asyncio.timeout(the.PATIENCE):
            await eight.wait()
            if row.place:
                await ninth.wait()

    assert_run(make(handle)(concurrency=8), processed=9)


@the.each_delivery
def test_a_run_from_an_async_view_does_not_wait_for_itself(make: the.Make) -> None:
    """The view's only thread for database calls is the one that the run is in."""
    the.errands(2)

    async def handle(row: Errand) -> None:
        await Errand.objects.filter(pk=row.pk).aupdate(result="work")

    run = make(handle)
    reports: list[Any] = []

    async def view() -> None:
        reports.append(await sync_to_async(run)())

    with the.meanwhile(async_to_sync(view)):
        pass
    [report] = reports
    assert_run(report, processed=2)


@the.each_delivery
def test_an_async_resource_that_cannot_be_opened_charges_no_row(make: the.Make) -> None:
    rows = the.errands(3)

    class NoShop:
        async def __aenter__(self) -> str:
            raise OSError("no shop")

        async def __aexit__(self, *error: object) -> None:
            """Close nothing."""

    async def handle(row: Errand, resource: str) -> None:
        """Handle it."""

    report = make(handle, resource=NoShop, batch_size=3)(concurrency=2)
    assert_run(report, stopped="failures")
    assert all(the.untouched(row) for row in rows)


@the.each_delivery
def test_threads_and_tasks_that_a_handler_leaves_are_ended(make: the.Make) -> None:
    the.errands(1)
    left: list[Any] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(the.PATIENCE)
        finally:
            left.append("cancelled")

    async def handle(row: Errand) -> None:
        left.append(asyncio.create_task(forever()))
        left.append(await asyncio.to_thread(threading.current_thread))
        await asyncio.sleep(0)

    assert_run(make(handle)(), processed=1)
    task, thread, word = left
    assert word == "cancelled"
    assert task.cancelled()
    until(lambda: not thread.is_alive(), "the end of the thread")


@pytest.mark.django_db(transaction=False)
@the.each_delivery
def test_inside_testcase_handlers_run_one_by_one(make: the.Make) -> None:
    the.errands(2)
    seen: list[int] = []
    at_work: list[int] = []

    async def handle(row: Errand) -> None:
        at_work.append(row.pk)
        await asyncio.sleep(0)
        seen.append(len(at_work))
        at_work.remove(row.pk)

    assert_run(make(handle, concurrency=3)(), processed=2)
    assert seen == [1, 1]


@pytest.mark.django_db(transaction=False)
@the.each_delivery
def test_inside_testcase_an_async_resource_is_refused(make: the.Make) -> None:
    """Its event loop would be gone when the handlers get it."""
    rows = the.errands(1)

    @asynccontextmanager
    async def shop() -> AsyncIterator[str]:
        yield "shop"

    async def handle(row: Errand, resource: str) -> None:
        """Handle it."""

    with pytest.raises(InvalidOption, match=r"got one for 'async with'.+not inside a TestCase"):
        make(handle, resource=shop)()
    assert all(the.untouched(row) for row in rows)


# --- rows of several claims under way on one event loop


@the.each_delivery
def test_no_more_are_in_flight_and_no_more_are_claimed_than_asked_for(make: the.Make) -> None:
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


@the.each_delivery
def test_a_worn_resource_is_closed_when_nobody_has_it_any_more(make: the.Make) -> None:
    the.errands(12)
    users: Counter[str] = Counter()
    in_use_when_closed: dict[str, int] = {}
    given: dict[int, str] = {}
    others_were_called = asyncio.Event()

    @asynccontextmanager
    async def shop() -> AsyncIterator[str]:
        name = f"shop {len(users) + 1}"
        users[name] = 0
        yield name
        in_use_when_closed[name] = users[name]

    async def handle(row: Errand, resource: str) -> None:
        given[row.place] = resource
        users[resource] += 1
        try:
            if len(given) == 12:
                others_were_called.set()
            if row.place == 0:
                async with asyncio.timeout(the.PATIENCE):
                    await others_were_called.wait()
            if row.place == 1:
                raise ValueError("the line was dead")
        finally:
            users[resource] -= 1

    report = make(handle, resource=shop, failed={"dead": True}).run(concurrency=2)
    assert_run(report, processed=11, failed=1)
    # The straggler keeps what it was given, and all others go on with a new one meanwhile.
    assert given == {0: "shop 1", 1: "shop 1", **dict.fromkeys(range(2, 12), "shop 2")}
    assert in_use_when_closed == {"shop 1": 0, "shop 2": 0}


class Result:
    """What a handler returned, which can be seen to be forgotten."""


@the.each_delivery
def test_i8_what_a_handler_returned_is_forgotten_once_its_row_is_settled(make: the.Make) -> None:
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
