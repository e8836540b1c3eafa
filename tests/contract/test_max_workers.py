"""``max_workers``: so many workers are at work at a time, and the next one leaves or waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dcl_processor import Report
from dcl_processor.locking.slots import Slot
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.contract.support.slots import holders
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.capped"


def capped(handler: Any, make: the.Make = the.transactional, most: int = 1, **options: Any) -> Any:
    """Make a worker of its own: another instance of the processor that has this name."""
    return make(handler, name=NAME, max_workers=most, **options)


def worker(handler: Any = the.ignore, **parameters: Any) -> Report:
    """Run as another worker does, in a thread and on connections of its own."""
    report: Report = the.elsewhere(lambda: capped(handler)(**parameters))
    return report


def done() -> int:
    return Errand.objects.filter(done=True).count()


@contextmanager
def taken(most: int = 1) -> Iterator[Slot]:
    """Hold a slot as another worker does, until the block's end or its release."""
    slot = Slot("other", NAME, most)
    try:
        assert slot.take()
        yield slot
    finally:
        slot.release()


@the.all_deliveries
def test_a_worker_over_the_cap_leaves_at_once_and_handles_nothing(make: the.Make) -> None:
    the.errands(3)
    over: list[Report] = []

    def handle(row: Errand) -> None:
        over.append(worker())

    report = capped(handle, make)(limit=1)
    assert_run(report, processed=1, stopped="limit")
    assert_run(over[0], stopped="busy", passes=1)
    assert over[0].ok
    assert not over[0].did_something
    assert str(over[0]).endswith("; all slots of max_workers are taken")
    # The end of the run has freed the slot.
    assert_run(worker(), processed=2)


def test_so_many_workers_are_at_work_and_no_more() -> None:
    the.errands(4)
    over: list[Report] = []

    def outer(row: Errand) -> None:
        the.elsewhere(lambda: capped(inner, most=2)(limit=1))

    def inner(row: Errand) -> None:
        assert len(set(holders(NAME, 2))) == 2
        over.append(the.elsewhere(capped(the.ignore, most=2)))

    assert_run(capped(outer, most=2)(limit=1), processed=1, stopped="limit")
    assert_run(over[0], stopped="busy", passes=1)
    assert done() == 2
    assert holders(NAME, 2) == []


def test_i1_a_run_without_pending_rows_asks_for_no_slot(django_assert_num_queries: Any) -> None:
    run = capped(the.ignore)
    with taken(), django_assert_num_queries(1):
        report = run()
    assert_run(report, passes=1)


@pytest.mark.parametrize("size", [1, 10])
@the.all_deliveries
def test_a_worker_that_loses_its_slot_finishes_the_row_at_hand_and_starts_no_other(
    make: the.Make, size: int
) -> None:
    """The session of its slot is ended, and another worker takes the slot."""
    rows = the.errands(4)
    calls: list[int] = []
    other = Slot("other", NAME, 1)

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 1:
            end_session(*holders(NAME, 1))
            assert other.take()

    try:
        report = capped(handle, make, batch_size=size)()
    finally:
        other.release()
    assert_run(report, processed=2, stopped="busy")
    assert calls == [0, 1]
    assert all(the.untouched(row) for row in rows[2:])
    assert_run(capped(handle, make)(), processed=2)


@pytest.mark.parametrize("size", [1, 10])
@the.all_deliveries
def test_a_worker_that_loses_its_slot_takes_a_free_one_again(make: the.Make, size: int) -> None:
    the.errands(4)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 1:
            end_session(*holders(NAME, 1))

    assert_run(capped(handle, make, batch_size=size)(), processed=4)
    assert calls == [0, 1, 2, 3]


def test_async_handlers_that_lose_the_slot_are_settled_before_the_run_leaves() -> None:
    the.errands(12)
    other, calls, taken = Slot("other", NAME, 1), list[int](), threading.Event()

    def take_away() -> None:
        end_session(*holders(NAME, 1))
        assert other.take()
        taken.set()

    async def handle(row: Errand) -> None:
        calls.append(row.place)
        if len(calls) == 5:
            await asyncio.to_thread(the.elsewhere, take_away)
        elif len(calls) > 5:
            # Otherwise these rows could all be done before the slot is lost, or end with the fifth.
            await asyncio.to_thread(the.wait, taken)

    run = capped(handle, the.at_least_once)
    report = run(concurrency=3)
    assert done() == len(calls) < 12
    assert Errand.objects.filter(leased_until__isnull=False).count() == 0
    assert_run(report, processed=len(calls), stopped="busy")
    other.release()


def test_an_interrupt_at_the_end_of_a_run_leaves_no_slot_taken_and_no_thread() -> None:
    """In a process that lives on, a shell for instance: the resource waits while it is closed."""
    the.errands(1)

    @contextmanager
    def opened() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    handled: list[int] = []
    run = capped(lambda row, _: handled.append(row.pk), the.at_least_once, resource=opened)
    # The error is kept, and with it the frames of the run.
    with pytest.raises(KeyboardInterrupt) as error:
        run()
    assert holders(NAME, 1) == []
    assert [thread.name for thread in threading.enumerate() if NAME in thread.name] == []
    assert len(handled) == error.value.report.processed == 1  # type: ignore[attr-defined]


def test_an_interrupt_while_a_slot_is_freed_closes_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    slot = Slot("default", NAME, 1)
    assert slot.take()
    monkeypatch.setattr(slot._locks, "free", interrupt)
    with pytest.raises(KeyboardInterrupt):
        slot.release()
    other = Slot("other", NAME, 1)
    try:
        until(other.take, "the server to notice that the session is closed")
    finally:
        other.release()


@the.each_delivery
def test_rows_are_handed_out_while_all_slots_are_taken(make: the.Make) -> None:
    """They are handled elsewhere, and no run is at work."""
    the.errands(2)
    processor = capped(the.ignore, make)
    with taken():
        reserved = processor.reserve(limit=2)
        assert len(reserved) == 2
        assert processor().stopped == "drained"  # no row is left that asks for a slot
    for each in reserved:
        each.settle()
    assert done() == 2
    with taken() as slot:
        assert slot.is_held()
