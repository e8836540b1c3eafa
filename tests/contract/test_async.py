"""Asynchronous handlers: many in flight on one loop, claimed and settled by the run's thread."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Event
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction

from dcl_processor import Delivery, Discard, Lease, Snooze, batch_processor
from dcl_processor.exceptions import Unsupported
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.runner.counters import Counters
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.errands import Make, each_delivery
from tests.contract.support.heartbeat import until
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]


class Gathering:
    """Lets handlers go when so many are in flight at once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.now = self.most = 0
        self.complete = asyncio.Event()

    async def __call__(self, row: Errand) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self.number:
            self.complete.set()
        async with asyncio.timeout(the.PATIENCE):
            await self.complete.wait()
        self.now -= 1


@each_delivery
def test_so_many_handlers_are_in_flight(make: Make) -> None:
    the.errands(8)
    gathering = Gathering(4)

    async def handle(row: Errand) -> None:
        await gathering(row)

    report = make(handle)(concurrency=4)
    assert_run(report, processed=8)
    assert gathering.most == 4


@each_delivery
def test_one_loop_and_not_the_runs_thread(make: Make) -> None:
    the.errands(6)
    where: set[Any] = set()

    async def handle(row: Errand) -> None:
        where.add((threading.current_thread(), asyncio.get_running_loop()))

    assert_run(make(handle)(concurrency=2), processed=6)
    [(thread, loop)] = where
    assert thread is not threading.current_thread()
    assert not thread.is_alive()
    assert loop.is_closed()


@each_delivery
def test_a_slow_handler_does_not_keep_fast_ones_from_being_settled(make: Make) -> None:
    rows = the.errands(5)

    async def handle(row: Errand) -> None:
        if row.pk == rows[0].pk:
            others = Errand.objects.using("other").exclude(pk=row.pk)
            look = sync_to_async(lambda: others.filter(done=True).count() == 4)
            async with asyncio.timeout(the.PATIENCE):
                while not await look():
                    await asyncio.sleep(0.01)

    assert_run(make(handle, batch_size=5)(concurrency=2), processed=5)


@each_delivery
def test_every_outcome_is_settled_as_its_own(make: Make) -> None:
    rows = the.errands(4)

    async def handle(row: Errand) -> str:
        match row.place:
            case 0:
                raise ValueError("no such place")
            case 1:
                raise Snooze("closed", delay=3600)
            case 2:
                raise Discard("never")
        return "here"

    run = make(
        handle,
        done=lambda row, result: {"done": True, "result": result},
        failed={"dead": True},
        retry=the.retry(backoff=3600),
        reset={"claimed": False},
    )
    report = run(concurrency=4)
    assert_run(report, processed=1, failed=1, discarded=1, snoozed=1, retried=1)
    said = [the.state(row) for row in rows]
    assert [each["attempts"] for each in said[:2]] == [1, 0]
    assert [each["dead"] for each in said] == [False, False, True, False]
    assert (said[3]["done"], said[3]["result"]) == (True, "here")
    assert not any(each["leased_until"] or each["claimed_at"] for each in said)


@each_delivery
def test_a_handler_that_cancels_itself_has_failed(make: Make) -> None:
    rows = the.errands(3)

    async def handle(row: Errand) -> None:
        if row.place == 1:
            raise asyncio.CancelledError

    report = make(handle, failed={"dead": True})(concurrency=3)
    assert_run(report, processed=2, failed=1)
    assert report.failures[0].pk == rows[1].pk


@each_delivery
def test_an_interrupt_in_a_handler_ends_the_run(make: Make) -> None:
    """It reaches the run's thread, and does not kill the loop that the others are on."""
    rows = the.errands(3)

    async def handle(row: Errand) -> None:
        if row.place == 0:
            raise KeyboardInterrupt
        await asyncio.sleep(the.PATIENCE)

    with pytest.raises(KeyboardInterrupt):
        make(handle, batch_size=3)(concurrency=2)
    assert the.untouched(rows[2])
    assert not any(the.state(row)["done"] for row in rows)


@each_delivery
def test_no_handler_is_started_in_the_place_of_one_that_ends_the_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interleaving: the first handler has ended before the second one is started."""
    rows = the.errands(3)
    start = EventLoop.start

    def started(self: EventLoop, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        if len(self._given) == 1:
            until(lambda: self._outcomes)

    monkeypatch.setattr(EventLoop, "start", started)

    async def handle(row: Errand) -> None:
        if row.place == 0:
            raise KeyboardInterrupt
        await asyncio.sleep(the.PATIENCE)

    with pytest.raises(KeyboardInterrupt):
        make(handle, batch_size=3)(concurrency=2)
    assert the.untouched(rows[2])


async def leave() -> None:
    sys.exit(2)


async def leave_in_a_task() -> None:
    """From the task asyncio raises it out of the loop as well."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leave())


async def leave_in_several_tasks() -> None:
    await asyncio.gather(leave(), leave())


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise ValueError("and went on")


@each_delivery
@pytest.mark.parametrize("end", [leave, leave_in_a_task, leave_in_several_tasks, stop_the_loop])
def test_a_handler_that_ends_the_loop_has_failed_and_the_others_go_on(make: Make, end: Any) -> None:
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


def test_a_stop_starts_nothing_more_and_finishes_what_is_under_way() -> None:
    rows = the.errands(6)
    stop = Event()

    async def handle(row: Errand) -> None:
        stop.set()
        await asyncio.sleep(0.05)

    run = the.at_least_once(handle, batch_size=6, retry=the.retry())
    report = run(concurrency=2, stop=stop)
    assert 1 <= report.processed <= 2
    assert_run(report, processed=report.processed, stopped="signal")
    assert all(the.untouched(row) for row in rows[report.processed :])


def test_a_timeout_finishes_what_is_under_way(clock: Clock) -> None:
    rows = the.errands(6)
    started: list[int] = []

    async def handle(row: Errand) -> None:
        started.append(row.place)
        async with asyncio.timeout(the.PATIENCE):
            while len(started) < 2:
                await asyncio.sleep(0.01)
        clock.passed = HOUR

    run = the.at_least_once(handle, batch_size=6, retry=the.retry())
    report = run(concurrency=2, timeout=HOUR)
    assert_run(report, processed=2, stopped="timeout")
    assert all(the.untouched(row) for row in rows[2:])


def test_an_interrupt_cancels_and_frees_and_costs_no_attempt(interrupt: Any) -> None:
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
    assert all(the.untouched(row) for row in rows)


@each_delivery
def test_a_free_place_is_filled_while_all_the_others_are_at_work(make: Make) -> None:
    """The first handler ends alone; the others stay until a ninth one has been started."""
    the.errands(9)
    gathering, ninth = Gathering(8), asyncio.Event()

    async def handle(row: Errand) -> None:
        if row.place == 8:
            ninth.set()
            return
        await gathering(row)
        if row.place:
            async with asyncio.timeout(the.PATIENCE):
                await ninth.wait()

    assert_run(make(handle)(concurrency=8), processed=9)


@each_delivery
def test_what_ends_in_spite_of_an_interrupt_is_settled(
    make: Make, interrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that sees its work through when it is cancelled has done it."""
    rows = the.errands(3)
    monkeypatch.setattr(Counters, "is_to_be_careful", False)  # as after the run's first row

    async def handle(row: Errand) -> str:
        if row.place == 1:
            interrupt()
        try:
            await asyncio.sleep(the.PATIENCE)
        except asyncio.CancelledError:
            if row.place != 0:
                raise
        return "seen through"

    run = make(handle, batch_size=3, done=lambda row, result: {"done": True, "result": result})
    with pytest.raises(KeyboardInterrupt):
        run(concurrency=2)
    said = [the.state(row) for row in rows]
    assert (said[0]["done"], said[0]["result"]) == (True, "seen through")
    assert the.untouched(rows[2])
    # Neither done nor failed: in doubt, or free for the next run.
    assert said[1]["claimed"] is (make is the.at_most_once)
    assert not said[1]["done"]


@each_delivery
def test_handlers_may_ask_the_database(make: Make) -> None:
    """In a thread of their own, whose connection is closed when the run ends."""
    rows = the.errands(4)
    before = the.sessions()

    async def handle(row: Errand) -> None:
        await Errand.objects.filter(pk=row.pk).aupdate(result="work")

    assert_run(make(handle)(concurrency=2), processed=4)
    assert [the.state(row)["result"] for row in rows] == ["work"] * 4
    until(lambda: the.sessions() <= before)


@each_delivery
def test_a_run_from_an_async_view_does_not_wait_for_itself(make: Make) -> None:
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


class Shop:
    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.loops: set[Any] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self.opened += 1
        self.loops.add(asyncio.get_running_loop())
        try:
            yield f"shop {self.opened}"
        finally:
            self.closed += 1
            self.loops.add(asyncio.get_running_loop())


@each_delivery
def test_an_async_resource_is_opened_once_on_the_loop(make: Make) -> None:
    the.errands(6)
    shop = Shop()
    given: list[str] = []

    async def handle(row: Errand, resource: str) -> None:
        shop.loops.add(asyncio.get_running_loop())
        given.append(resource)

    assert_run(make(handle, resource=shop.open)(concurrency=2), processed=6)
    assert given == ["shop 1"] * 6
    assert (shop.opened, shop.closed, len(shop.loops)) == (1, 1, 1)


@each_delivery
def test_an_async_resource_is_opened_anew_after_a_failure(make: Make) -> None:
    the.errands(4)
    shop = Shop()
    given: list[str] = []

    async def handle(row: Errand, resource: str) -> None:
        given.append(resource)
        if row.place == 0:
            raise ValueError

    report = make(handle, resource=shop.open, failed={"dead": True})(concurrency=2)
    assert_run(report, processed=3, failed=1)
    assert given == ["shop 1", "shop 1", "shop 2", "shop 2"]
    assert (shop.opened, shop.closed) == (2, 2)


@each_delivery
def test_a_plain_resource_serves_async_handlers(make: Make) -> None:
    the.errands(2)

    @contextmanager
    def open_it() -> Iterator[str]:
        yield "plain"

    given: list[str] = []

    async def handle(row: Errand, resource: str) -> None:
        given.append(resource)

    assert_run(make(handle, resource=open_it)(concurrency=2), processed=2)
    assert given == ["plain"] * 2


@each_delivery
def test_an_async_resource_that_cannot_be_opened_charges_no_row(make: Make) -> None:
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


@each_delivery
def test_threads_and_tasks_that_a_handler_leaves_are_ended(make: Make) -> None:
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
    assert not thread.is_alive()


async def do_nothing(row: Errand) -> None:
    """Handle a row by doing nothing."""


def test_transactional_is_refused_and_told_the_alternatives() -> None:
    with pytest.raises(Unsupported, match="AT_LEAST_ONCE or AT_MOST_ONCE"):
        batch_processor(pending=the.PENDING, done={"done": True}, delivery=Delivery.TRANSACTIONAL)(
            do_nothing
        )


@each_delivery
def test_inside_testcase_handlers_run_one_at_a_time(make: Make) -> None:
    the.errands(3)
    at_work: list[int] = []
    most: list[int] = []

    async def handle(row: Errand) -> None:
        at_work.append(row.pk)
        await asyncio.sleep(0)
        most.append(len(at_work))
        at_work.remove(row.pk)

    block = transaction.atomic()
    block._from_testcase = True  # type: ignore[attr-defined]  # Django's own mark
    with block:
        assert_run(make(handle)(concurrency=3), processed=3)
    assert not connection.in_atomic_block
    assert most == [1, 1, 1]


def test_a_lease_is_kept_while_a_handler_is_awaited(beats_soon: None) -> None:
    [row] = the.errands(1)

    async def handle(row: Errand) -> None:
        first = await Errand.objects.values_list("leased_until", flat=True).aget(pk=row.pk)
        assert first is not None
        later = Errand.objects.filter(leased_until__gt=first)
        look = sync_to_async(later.exists)
        async with asyncio.timeout(the.PATIENCE):
            while not await look():
                await asyncio.sleep(0.01)

    assert_run(the.at_least_once(handle, lease=Lease(60))(concurrency=2), processed=1)
    assert the.state(row)["leased_until"] is False
