"""``async def process_batch()``: calls on one event loop, each with the rows of a claim."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dcl_processor import BatchProcessor, Discard, Snooze
from dcl_processor.exceptions import Unsupported
from dcl_processor.runner.counters import Counters
from tests.contract.support import errands as the
from tests.contract.support.errands import Make, each_delivery
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]

Rows = Sequence[Errand]


def bulk(make: Make, handle: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that handles five rows in one call, unless told otherwise."""
    return make(the.ignore, **{"process_batch": handle, "batch_size": 5, **options})


def done_places() -> list[int]:
    done = Errand.objects.filter(done=True, leased_until=None, claimed_at=None)
    return list(done.order_by("place").values_list("place", flat=True))


@each_delivery
def test_concurrency_counts_calls(make: Make) -> None:
    the.errands(23)
    now: set[int] = set()
    most: list[int] = []
    sizes: list[int] = []
    complete = asyncio.Event()

    async def handle(rows: Rows) -> None:
        sizes.append(len(rows))
        now.add(rows[0].pk)
        most.append(len(now))
        if len(now) == 3:
            complete.set()
        async with asyncio.timeout(the.PATIENCE):
            await complete.wait()
        now.discard(rows[0].pk)

    assert_run(bulk(make, handle)(concurrency=3), processed=23)
    assert max(most) == 3
    assert sorted(sizes) == [3, 5, 5, 5, 5]
    assert done_places() == list(range(23))


@each_delivery
def test_a_slow_call_does_not_keep_other_rows_from_being_claimed(make: Make) -> None:
    the.errands(30)
    others: list[int] = []
    may_end = asyncio.Event()

    async def handle(rows: Rows) -> None:
        if rows[0].place == 0:
            async with asyncio.timeout(the.PATIENCE):
                await may_end.wait()
            return
        others.extend(row.place for row in rows)
        if len(others) == 25:
            may_end.set()

    assert_run(bulk(make, handle)(concurrency=2), processed=30)
    assert done_places() == list(range(30))


@each_delivery
@pytest.mark.parametrize("by_key", [False, True], ids=["list", "mapping"])
def test_what_gather_returned_is_each_rows_outcome(make: Make, by_key: bool) -> None:
    rows = the.errands(6)

    async def send(row: Errand) -> str:
        match row.place:
            case 1:
                raise ValueError("no")
            case 2:
                raise Snooze(delay=60)
            case 3:
                raise Discard("never")
            case 4:
                raise asyncio.CancelledError
        return "sent"

    async def handle(given: Rows) -> Any:
        results = await asyncio.gather(*map(send, given), return_exceptions=True)
        if by_key:
            return {row.pk: each for row, each in zip(given, results, strict=True)}
        return results

    options = {"reset": {"claimed": False}, "failed": {"dead": True}, "batch_size": 6}
    report = bulk(make, handle, retry=the.retry(backoff=60), **options)(concurrency=2)
    assert_run(report, processed=2, failed=2, snoozed=1, discarded=1, retried=2)
    said = [the.state(row) for row in rows]
    assert [each["done"] for each in said] == [True, False, False, False, False, True]
    assert [each["dead"] for each in said] == [False, False, False, True, False, False]
    assert [each["attempts"] for each in said] == [0, 1, 0, 1, 1, 0]
    assert not any(each["leased_until"] or each["claimed_at"] for each in said)


def test_at_least_once_calls_each_row_again_alone_when_a_call_raises() -> None:
    rows = the.errands(5)
    calls: list[list[int]] = []

    async def handle(given: Rows) -> None:
        calls.append([row.place for row in given])
        if any(row.place == 1 for row in given):
            raise ValueError("place 1")

    report = bulk(the.at_least_once, handle, retry=the.retry(backoff=60))(concurrency=2)
    assert_run(report, processed=4, failed=1, retried=1)
    assert calls[0] == [0, 1, 2, 3, 4]
    assert sorted(calls[1:]) == [[0], [1], [2], [3], [4]]
    assert done_places() == [0, 2, 3, 4]
    assert the.state(rows[1])["attempts"] == 1


def test_at_most_once_calls_no_row_again_when_a_call_raises() -> None:
    the.errands(7)
    calls: list[list[int]] = []

    async def handle(given: Rows) -> None:
        calls.append([row.place for row in given])
        if any(row.place == 1 for row in given):
            raise ValueError("place 1")

    report = bulk(the.at_most_once, handle, failed={"dead": True})(concurrency=2)
    assert_run(report, processed=2, failed=5)
    assert sorted(calls) == [[0, 1, 2, 3, 4], [5, 6]]
    assert done_places() == [5, 6]


def test_a_resource_is_opened_again_before_the_rows_are_called_alone() -> None:
    the.errands(4)
    events: list[str] = []

    @asynccontextmanager
    async def line() -> AsyncIterator[int]:
        number = sum(each.startswith("open") for each in events)
        events.append(f"open {number}")
        yield number
        events.append(f"close {number}")

    async def handle(given: Rows, number: int) -> None:
        if number == 0:
            raise ConnectionError("a broken line")

    run = bulk(the.at_least_once, handle, resource=line, retry=the.retry())
    assert_run(run(concurrency=2), processed=4)
    assert sorted(events) == ["close 0", "close 1", "open 0", "open 1"]


def test_a_resource_that_cannot_be_opened_again_costs_no_row_an_attempt() -> None:
    rows = the.errands(4)
    opened: list[bool] = []

    @asynccontextmanager
    async def line() -> AsyncIterator[None]:
        if opened:
            raise ConnectionRefusedError
        opened.append(True)
        yield

    async def handle(given: Rows, line: None) -> None:
        raise ValueError

    report = bulk(the.at_least_once, handle, resource=line, retry=the.retry())(concurrency=2)
    assert_run(report, stopped="failures")
    assert all(the.untouched(row) for row in rows)


@each_delivery
def test_an_interrupt_leaves_the_rows_of_all_calls_as_the_delivery_says(
    make: Make, interrupt: Any
) -> None:
    rows = the.errands(12)
    calls: list[int] = []
    at_work = asyncio.Event()

    async def handle(given: Rows) -> None:
        calls.append(len(given))
        if len(calls) == 2:
            at_work.set()
            interrupt()
        await at_work.wait()
        await asyncio.sleep(the.PATIENCE)

    options = {"retry": the.retry()} if make is the.at_least_once else {}
    run = bulk(make, handle, **options)
    with pytest.raises(KeyboardInterrupt):
        run(concurrency=2)
    if make is the.at_least_once:
        assert all(the.untouched(row) for row in rows)
    else:
        assert run.in_doubt(older_than=0).count() == 10
        assert all(the.untouched(row) for row in rows[10:])


@each_delivery
def test_a_limit_counts_the_rows_of_calls_that_are_under_way(make: Make) -> None:
    the.errands(20)

    async def handle(given: Rows) -> None:
        await asyncio.sleep(0.01)

    assert_run(bulk(make, handle)(concurrency=4, limit=13), processed=13, stopped="limit")
    assert len(done_places()) == 13


@each_delivery
def test_the_rows_of_a_call_are_settled_by_one_statement(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    the.errands(10)
    monkeypatch.setattr(Counters, "is_to_be_careful", False)  # as after the run's first row

    async def handle(given: Rows) -> list[str]:
        return [f"sent {row.place}" for row in given]

    def done(row: Errand, result: str) -> dict[str, Any]:
        return {"done": True, "result": result}

    with CaptureQueriesContext(connection) as queries:
        assert_run(bulk(make, handle, done=done)(concurrency=1), processed=10)
    flips = [each["sql"] for each in queries if each["sql"].startswith("UPDATE")]
    assert len([sql for sql in flips if "sent" in sql]) == 2
    said = Errand.objects.order_by("place").values_list("result", flat=True)
    assert list(said) == [f"sent {place}" for place in range(10)]


def test_transactional_is_refused() -> None:
    async def handle(given: Rows) -> None: ...

    with pytest.raises(Unsupported, match=r"expected a plain function, got 'async def handle'"):
        bulk(the.transactional, handle)
