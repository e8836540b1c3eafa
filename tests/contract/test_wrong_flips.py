"""Flips that cannot be written, found before many handlers are called; and rows that all fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import F, QuerySet

from dcl_processor import BatchProcessor, Report
from dcl_processor.candidates import scan
from dcl_processor.exceptions import InvalidDone, StillPending
from dcl_processor.runner.counters import MOST_FROM_THE_START
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


def raises(*_: object) -> dict[str, Any]:
    raise KeyError("charge")


WRONG: dict[str, Callable[..., Any]] = {
    "nothing": lambda *_: None,
    "no mapping": lambda *_: "done",
    "unknown column": lambda *_: {"dnoe": True},
    "primary key": lambda *_: {"pk": 3},
    "unknown expression": lambda *_: {"place": F("palce") + 1, "done": True},
    "wrong value": lambda *_: {"place": "three", "done": True},
    "raises": raises,
}
each_wrong = pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)


def of_result(wrong: Callable[..., Any]) -> Callable[[Errand, Any], Any]:
    return lambda row, result: wrong(row, result)  # noqa: PLW0108  # for its signature


def of_row(wrong: Callable[..., Any]) -> Callable[[Errand], Any]:
    return lambda row: wrong(row)  # noqa: PLW0108  # likewise


def refused(report: Report) -> bool:
    return (
        (report.processed, report.failed, report.stopped) == (0, 2, "failures")
        and all(isinstance(each.error, InvalidDone) for each in report.failures)
        and all("expected done to" in str(each.error) for each in report.failures)
    )


@the.all_deliveries
@each_wrong
def test_a_wrong_flip_of_the_result_ends_the_run_at_its_second_row(make: Any, wrong: Any) -> None:
    the.errands(30)
    calls: list[int] = []
    process = make(lambda row: calls.append(row.place), done=of_result(wrong))
    for run in (1, 2):
        assert refused(process())
        assert len(calls) == 2 * run


@the.all_deliveries
@each_wrong
def test_a_wrong_flip_of_the_row_alone_calls_no_handler(make: Any, wrong: Any) -> None:
    rows = the.errands(30)
    calls: list[int] = []
    process = make(
        lambda row: calls.append(row.place),
        done=of_row(wrong),
        **({} if make is the.at_most_once else {"retry": the.retry()}),
    )
    for _ in range(2):
        assert refused(process())
    assert calls == []
    # Neither an attempt nor a mark.
    assert all(the.untouched(row) for row in rows)


@the.all_deliveries
def test_a_flip_of_the_row_alone_that_leaves_it_pending_calls_no_handler(make: Any) -> None:
    the.errands(30)
    calls: list[int] = []
    options = {"claim": {"result": "claimed"}} if make is the.at_most_once else {}
    pending = Errand.objects.filter(done=False, result="")
    process = make(
        lambda row: calls.append(row.place),
        pending=pending,
        done=lambda row: {"place": row.place, "result": ""},
        **options,
    )
    for _ in range(2):
        report = process()
        assert_run(report, failed=2, stopped="failures")
        assert isinstance(report.failures[0].error, StillPending)
        assert "its handler was not called" in str(report.failures[0].error)
    assert calls == []


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 10])
def test_a_row_whose_flip_cannot_be_foreseen_costs_the_others_nothing(make: Any, size: int) -> None:
    the.errands(20)
    calls: list[int] = []
    process = make(
        lambda row: calls.append(row.place),
        done=lambda row: {"done": True} if row.place else None,
        batch_size=size,
    )
    report = process()
    assert_run(report, processed=19, failed=1)
    assert sorted(calls) == list(range(1, 20))


MAKERS = {"transactional": the.transactional, "lease": the.at_least_once, "claim": the.at_most_once}
# Without row locks a transaction keeps the others from starting.
TOGETHER = [
    pytest.param(make, concurrency, id=f"{name}-{concurrency}")
    for name, make in MAKERS.items()
    for concurrency in (1, 4)
    if HAS_ROW_LOCKS or make is not the.transactional or concurrency == 1
]


@pytest.mark.parametrize(("make", "concurrency"), TOGETHER)
def test_however_many_rows_come_together_a_wrong_flip_is_called_for_twice(
    make: Any, concurrency: int
) -> None:
    the.errands(60)
    calls: list[int] = []
    process = make(lambda row: calls.append(row.place), done=of_result(raises), batch_size=30)
    report = process(concurrency=concurrency)
    assert_run(report, failed=2, stopped="failures")
    # A TRANSACTIONAL row's error may be found at the end of its batch, which is redone.
    assert len(calls) == len(set(calls)) == 2


def test_asynchronous_handlers_start_when_the_first_flip_was_written() -> None:
    the.errands(60)
    calls: list[int] = []

    async def handle(row: Errand) -> None:
        calls.append(row.place)

    report = the.at_least_once(handle, done=of_result(raises), batch_size=30)(concurrency=20)
    assert_run(report, failed=2, stopped="failures")
    assert len(calls) == 2


def fails(*_: object) -> None:
    raise OSError("no answer")


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 7, 200])
def test_a_run_in_which_nothing_succeeds_ends_after_some_failures(make: Any, size: int) -> None:
    the.errands(120)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        fails()

    report = make(handle, batch_size=size)()
    assert_run(report, failed=MOST_FROM_THE_START, stopped="failures")
    assert len(calls) == len(set(calls)) == MOST_FROM_THE_START


def test_one_success_at_the_beginning_is_enough_to_go_on() -> None:
    the.errands(80)

    def handle(row: Errand) -> None:
        if row.place:
            fails()

    report = the.transactional(handle)()
    assert_run(report, processed=1, failed=79)


@pytest.mark.parametrize("most", [None, 4])
@pytest.mark.parametrize("size", [1, 10])
def test_rows_that_always_fail_at_the_head_keep_no_others_waiting_for_ever(
    most: int | None, size: int
) -> None:
    poison = most or 2 * MOST_FROM_THE_START
    the.errands(2 * poison)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place < poison:
            fails()

    process = the.transactional(handle, max_consecutive_failures=most, batch_size=size)
    for _ in range(100):
        calls.clear()
        process()
        assert len(calls) == len(set(calls))  # a row is tried at most once in a run
        if Errand.objects.filter(done=True).count() == poison:
            break
    assert Errand.objects.filter(done=True, place__gte=poison).count() == poison


def test_a_row_that_failed_at_a_random_place_is_not_read_again_among_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried before its window, and stays pending when all other rows are finished."""
    monkeypatch.setattr(scan, "WINDOW", 4)
    monkeypatch.setattr(scan, "WIDE_WINDOW", 50)
    rows = the.errands(20)
    monkeypatch.setattr(scan, "anywhere", lambda *_: [rows[8].pk, rows[9].pk])
    calls: list[int] = []
    reads: list[Any] = []

    class Reading(BatchProcessor[Errand]):
        done = {"done": True}
        max_consecutive_failures = 4

        def pending(self) -> QuerySet[Errand]:
            reads.append(None)
            return the.PENDING

        def process(self, row: Errand, /) -> None:
            calls.append(row.place)
            if row.place == 4:  # as another worker does
                Errand.objects.filter(pk=rows[5].pk).update(done=True)
            if row.place in {0, 1, 8}:
                fails()

    assert_run(Reading()(), processed=16, failed=3, stale=1)
    assert calls[:5] == [0, 1, 8, 9, 2]
    assert len(calls) == len(set(calls))
    assert len(reads) < 15
