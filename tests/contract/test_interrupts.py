"""Ctrl-C, a stop and limits: I10, and what is left of a batch that ends before its end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest
from django.db import connection, transaction

from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.parcels import in_batches, note, parcels, sent, worked
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.parametrize(
    ("make", "is_async"),
    [
        (the.transactional, False),
        *(
            (make, is_async)
            for make in (the.at_most_once, the.at_least_once)
            for is_async in (0, 1)
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 6])
def test_i10_a_stop_finishes_the_row_at_hand_and_puts_the_others_back(
    make: the.Make, size: int, is_async: bool
) -> None:
    rows = the.errands(6)
    stop = threading.Event()

    def handle(row: Errand) -> None:
        if row.place == 2:
            stop.set()

    async def handle_on_a_loop(row: Errand) -> None:
        handle(row)

    run = make(handle_on_a_loop if is_async else handle, batch_size=size)
    assert_run(run(stop=stop), processed=3, stopped="signal")
    assert the.places(done=True) == [0, 1, 2]
    assert all(the.untouched(row) for row in rows[3:])


#: What the crash table says of a row whose process ends in its handler.
LEFT: list[Any] = [
    pytest.param(the.transactional, {}, id="transactional"),
    pytest.param(the.at_most_once, {"claimed": True, "claimed_at": True}, id="at_most_once"),
    pytest.param(the.at_least_once, {"leased_until": True, "attempts": 1}, id="at_least_once"),
]


@pytest.mark.parametrize(("make", "left"), LEFT)
@pytest.mark.parametrize("size", [1, 6])
def test_i10_an_interrupt_in_a_handler_leaves_its_row_as_a_kill_does_and_puts_the_others_back(
    make: the.Make, left: dict[str, Any], size: int
) -> None:
    rows = the.errands(6)
    before = the.state(rows[0])

    def handle(row: Errand) -> None:
        if row.place == 2:
            raise KeyboardInterrupt

    retry = {} if make is the.at_most_once else {"retry": the.retry()}
    with pytest.raises(KeyboardInterrupt) as interrupted:
        make(handle, batch_size=size, **retry)()
    done = the.places(done=True)
    # A batch of one transaction goes as a whole.
    assert done == ([] if make is the.transactional and size > 1 else [0, 1])
    assert the.state(rows[2]) == {**before, **left}
    assert all(the.untouched(row) for row in rows[3:])
    report = interrupted.value.report  # type: ignore[attr-defined]  # as documented
    assert_run(report, processed=len(done), stopped="signal")
    assert not connection.in_atomic_block
    assert not the.our_threads()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.usefixtures("interrupt")
def test_i10_an_interrupt_that_ends_no_wait_ends_the_run(is_async: bool) -> None:
    """It came to another thread, or between Python's last look for it and the wait."""
    the.errands(2)
    calls: list[int] = []

    def press(row: Errand) -> None:
        calls.append(row.place)
        time.sleep(0.1)  # until the run waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    async def handle_on_a_loop(row: Errand) -> None:
        press(row)
        await asyncio.Event().wait()

    def handle(row: Errand) -> None:
        press(row)
        time.sleep(2)  # until the run has looked for signals

    make = the.at_least_once(handle_on_a_loop if is_async else handle)
    with pytest.raises(KeyboardInterrupt):
        make(concurrency=2, limit=1)
    assert calls == [0]
    until(lambda: not the.our_threads(), "the threads to end")


def test_a_limit_is_kept_within_a_batch() -> None:
    parcels(10)
    calls: list[int] = []
    report = in_batches(lambda row: calls.append(row.priority), batch_size=4)(limit=6)
    assert_run(report, processed=6, stopped="limit")
    assert calls == sent() == list(range(6))


def test_a_timeout_leaves_the_rest_of_the_batch_as_it_was(clock: Clock) -> None:
    parcels(4)

    def handle(row: Parcel) -> None:
        if row.priority == 1:
            clock.passed += HOUR

    report = in_batches(handle)(timeout=HOUR)
    assert_run(report, processed=2, stopped="timeout")
    assert sent() == [0, 1]


def test_i10_an_interrupt_rolls_the_whole_batch_back_and_ends_the_run() -> None:
    parcels(4)
    ran: list[int] = []

    def handle(row: Parcel) -> None:
        note(row)
        transaction.on_commit(lambda: ran.append(row.priority))
        if row.priority == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_batches(handle)()
    assert (sent(), worked(), ran) == ([], [], [])
    assert not connection.in_atomic_block
    assert connection.execute_wrappers == []
    assert_run(in_batches(note)(), processed=4)


def test_so_many_failures_in_a_row_end_a_batch_before_its_end() -> None:
    parcels(20)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if row.priority > 4:
            raise ConnectionError

    report = in_batches(handle, max_consecutive_failures=3, batch_size=10)()
    assert_run(report, processed=5, failed=3, stopped="failures")
    assert calls == list(range(8))
    assert sent() == [0, 1, 2, 3, 4]


def test_failures_in_a_row_are_counted_across_batches_and_a_success_ends_the_count() -> None:
    parcels(20)
    good = {0, 3, 6}

    def handle(row: Parcel) -> None:
        if row.priority not in good:
            raise ConnectionError

    report = in_batches(handle, max_consecutive_failures=4, batch_size=2)()
    assert_run(report, processed=3, failed=8, stopped="failures")
