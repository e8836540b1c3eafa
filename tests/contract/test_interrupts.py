"""Ctrl-C, a stop and limits: I10, and what is left of a batch that ends before its end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection

from dcl_processor import BatchProcessor
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.messages import updates
from tests.contract.support.parcels import in_batches, parcels, sent
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
    rows = the.errands(6, attempts=1)
    before, stop = the.state(rows[0]), threading.Event()

    def handle(row: Errand) -> None:
        if row.place == 2:
            stop.set()

    async def handle_on_a_loop(row: Errand) -> None:
        handle(row)

    options: Any = {"retry": the.retry()} if make is the.at_least_once else {}
    run = make(handle_on_a_loop if is_async else handle, batch_size=size, **options)
    assert_run(run(stop=stop), processed=3, stopped="signal")
    assert the.places(done=True) == [0, 1, 2]
    assert [the.state(row) for row in rows[3:]] == [before] * 3


#: Ctrl-C, and Celery's soft time limit.
interrupts = pytest.mark.parametrize("error", [KeyboardInterrupt, SoftTimeLimitExceeded])


def last_attempt(make: the.Make, handler: Any, **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that gives a row up after one failure."""
    return make(handler, failed={"dead": True}, **the.retried(make, max_attempts=1), **options)


#: What the crash table says of a row whose process ends in its handler.
LEFT: list[Any] = [
    pytest.param(the.transactional, {}, id="transactional"),
    pytest.param(the.at_most_once, {"claimed": True, "claimed_at": True}, id="at_most_once"),
    pytest.param(the.at_least_once, {"leased_until": True, "attempts": 1}, id="at_least_once"),
]


@interrupts
@pytest.mark.parametrize(("make", "left"), LEFT)
@pytest.mark.parametrize("size", [1, 6])
def test_i10_an_interrupt_in_a_handler_leaves_its_row_as_a_kill_does_and_puts_the_others_back(
    make: the.Make, left: dict[str, Any], size: int, error: type[BaseException]
) -> None:
    rows = the.errands(6)
    before = the.state(rows[0])

    def handle(row: Errand) -> None:
        if row.place == 2:
            raise error

    with pytest.raises(error) as interrupted:
        last_attempt(make, handle, batch_size=size)()
    done = the.places(done=True)
    # A batch of one transaction goes as a whole.
    assert done == ([] if make is the.transactional and size > 1 else [0, 1])
    assert the.state(rows[2]) == {**before, **left}
    assert all(the.untouched(row) for row in rows[3:])
    report = interrupted.value.report  # type: ignore[attr-defined]  # as documented
    assert_run(report, processed=len(done), stopped="signal")
    assert not connection.in_atomic_block
    assert not the.our_threads()


@interrupts
def test_i10_an_interrupt_raised_in_an_asynchronous_handler_ends_the_run_as_well(
    error: type[BaseException],
) -> None:
    [row] = the.errands(1)

    async def handle(_: Errand) -> None:
        raise error

    with pytest.raises(error):
        last_attempt(the.at_least_once, handle)()
    assert (the.state(row)["leased_until"], the.state(row)["dead"]) == (True, False)


@contextmanager
def interrupted_at(
    when: Callable[[str], bool], error: type[BaseException], *, after: bool = False
) -> Iterator[None]:
    """Raise the error instead of the first statement for which it is time, or after it."""
    raised: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if not raised and when(sql):
            raised.append(sql)
            if after:
                execute(sql, *args)
            raise error
        return execute(sql, *args)

    with connection.execute_wrapper(wrapper):
        yield
    assert raised, "expected such a statement, and there was none"


@interrupts
@the.all_deliveries
def test_i10_an_interrupt_while_an_outcome_is_written_is_no_failure(
    make: the.Make, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    rows = the.errands(2)
    handled: list[int] = []

    def settles(sql: str) -> bool:
        return bool(handled) and "UPDATE" in sql

    with pytest.raises(error), interrupted_at(settles, error):
        last_attempt(make, lambda row: handled.append(row.place))()
    assert handled == [0]
    # Outside a transaction the work cannot be undone, and so it is noted first.
    assert the.state(rows[0])["done"] is (make is not the.transactional)
    assert the.state(rows[0])["dead"] is False
    assert the.untouched(rows[1])
    assert not [each for each in caplog.messages if "row" in each.split()]
    rest = 2 if make is the.transactional else 1
    assert_run(last_attempt(make, the.ignore)(), processed=rest)


@the.each_delivery
def test_i10_a_row_whose_outcome_was_written_before_the_interrupt_is_processed(
    make: the.Make,
) -> None:
    """The write is repeated, finds nothing to write, and looks up what is there."""
    [row] = the.errands(1)
    handled: list[int] = []

    def settles(sql: str) -> bool:
        return bool(handled) and updates(sql)

    run = last_attempt(make, lambda row: handled.append(row.place))
    interrupting = interrupted_at(settles, KeyboardInterrupt, after=True)
    with pytest.raises(KeyboardInterrupt) as interrupted, interrupting:
        run()
    assert the.state(row)["done"] is True
    report = interrupted.value.report  # type: ignore[attr-defined]  # as documented
    assert_run(report, processed=1, stopped="signal")


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
