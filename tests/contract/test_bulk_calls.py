"""``process_batch()`` in each delivery: what a call returns, raises, and loses on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dcl_processor import BatchProcessor, Discard, Snooze
from dcl_processor.engine import heartbeat
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.errands import Make, each_delivery
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]

Rows = Sequence[Errand]


#: What ``AT_MOST_ONCE`` needs to put a row back; the others have no use for it.
RESET = {"claimed": False, "done": False}


def bulk(make: Make, handle: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that handles ten rows in one call, unless told otherwise."""
    return make(the.ignore, **{"process_batch": handle, "batch_size": 10, **options})


class Calls:
    """Remembers the places of each call's rows, and answers with what ``answer`` returns."""

    def __init__(self, answer: Callable[[Rows], Any] = lambda rows: None) -> None:
        self.answer = answer
        self.places: list[list[int]] = []

    def __call__(self, rows: Rows) -> Any:
        self.places.append([row.place for row in rows])
        return self.answer(rows)


def test_at_most_once_leaves_rows_in_doubt_that_have_no_result() -> None:
    """The service may have handled them, so they are not tried again."""
    the.errands(3)
    calls = Calls(lambda rows: [None])
    options = {"retry": the.retry(), "reset": RESET, "failed": {"dead": True}}
    run = bulk(the.at_most_once, calls, **options)
    report = run()
    assert_run(report, failed=3)
    assert "one result for each of 3 rows, got 1" in str(report.failures[0].error)
    assert [row.place for row in run.in_doubt(older_than=0)] == [0, 1, 2]
    assert_run(run())
    assert len(calls.places) == 1


@the.all_deliveries
@pytest.mark.parametrize("answer", ["sent", {1: "sent", 2: "sent"}, 7, iter([1, 2])], ids=repr)
def test_what_has_no_result_for_each_row_is_refused(make: Make, answer: Any) -> None:
    the.errands(2)
    report = bulk(make, Calls(lambda rows: answer), failed={"dead": True})()
    assert_run(report, failed=2)
    assert "to return None, or a list with one result" in str(report.failures[0].error)
    assert the.places(done=True) == []


@pytest.mark.parametrize("error", [ValueError("no"), Discard("never"), Snooze()], ids=repr)
def test_at_most_once_calls_no_row_again_when_a_call_raises(error: Exception) -> None:
    the.errands(4)
    calls = Calls(the.raising(error))
    report = bulk(the.at_most_once, calls, reset=RESET, failed={"dead": True})()
    assert calls.places == [[0, 1, 2, 3]]
    match error:
        case Snooze():
            assert_run(report, snoozed=4)
            assert the.places(claimed=False, dead=False) == [0, 1, 2, 3]
        case Discard():
            assert_run(report, discarded=4)
            assert the.places(dead=True) == [0, 1, 2, 3]
        case _:
            assert_run(report, failed=4)
            assert the.places(dead=True) == [0, 1, 2, 3]
    assert the.places(done=True) == []


@each_delivery
def test_an_interrupt_in_a_call_leaves_its_rows_as_the_delivery_says(make: Make) -> None:
    rows = the.errands(3)
    options = {"retry": the.retry()} if make is the.at_least_once else {}
    run = bulk(make, the.raising(KeyboardInterrupt()), **options)
    with pytest.raises(KeyboardInterrupt):
        run()
    if make is the.at_least_once:
        assert all(the.untouched(row) for row in rows)
    else:
        assert run.in_doubt(older_than=0).count() == 3


class Line(AbstractContextManager[Any], AbstractAsyncContextManager[Any]):
    """A resource of either kind; the first one is broken."""

    opened: list[Line]
    closed: list[Line]

    def __enter__(self) -> bool:
        self.opened.append(self)
        return len(self.opened) == 1

    def __exit__(self, *_: object) -> None:
        self.closed.append(self)

    async def __aenter__(self) -> bool:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_resource_is_opened_again_before_the_rows_are_called_alone(is_async: bool) -> None:
    the.errands(4)
    Line.opened, Line.closed = [], []

    def handle(given: Rows, is_broken: bool) -> None:
        if is_broken:
            raise ConnectionError("a broken line")

    async def handle_async(given: Rows, is_broken: bool) -> None:
        handle(given, is_broken)

    options = {"resource": Line, "retry": the.retry(), "concurrency": 1 + is_async}
    run = bulk(the.at_least_once, handle_async if is_async else handle, **options)
    assert_run(run(), processed=4)
    assert (len(Line.opened), Line.closed) == (2, Line.opened)


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_rows_whose_leases_lapse_in_a_call_that_raises_are_not_called_alone(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended: another worker may have the rows by now."""
    the.errands(3)
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)

    def sleep(rows: Rows) -> None:
        clock.passed = HOUR
        raise ValueError

    calls = Calls(sleep)

    async def handle_async(rows: Rows) -> None:
        calls(rows)

    run = bulk(the.at_least_once, handle_async if is_async else calls)
    assert_run(run(), lease_lost=3, redone=3)
    assert calls.places == [[0, 1, 2]]


@each_delivery
def test_the_rows_of_a_call_are_settled_in_one_transaction(make: Make) -> None:
    """Each row has a result of its own; a batch more costs one claim and one settlement."""
    counts = []
    for number in (11, 31):
        Errand.objects.all().delete()
        the.errands(number)
        calls = Calls(lambda rows: [f"sent {row.place}" for row in rows])
        with CaptureQueriesContext(connection) as queries:
            assert_run(bulk(make, calls, done=the.with_result)(), processed=number)
        counts.append(len([each for each in queries if each["sql"] == "COMMIT"]))
        said = Errand.objects.order_by("place").values_list("result", flat=True)
        assert list(said) == [f"sent {place}" for place in range(number)]
    assert counts[1] - counts[0] <= 2 * 2


# --- ``async def process_batch()``: calls on one event loop, each with the rows of a claim


def in_fives(make: Make, handle: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that handles five rows in one call, unless told otherwise."""
    return make(the.ignore, **{"process_batch": handle, "batch_size": 5, **options})


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

    assert_run(in_fives(make, handle)(concurrency=3), processed=23)
    assert max(most) == 3
    assert sorted(sizes) == [3, 5, 5, 5, 5]
    assert the.places(done=True, leased_until=None, claimed_at=None) == list(range(23))
