"""``process_batch()``: all rows of a batch at once, and one by one when it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dcl_processor import BatchProcessor, Discard, Retry, Snooze
from dcl_processor.engine import heartbeat
from dcl_processor.exceptions import HandlerExited
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

Rows = list[Errand]


class Calls:
    """Writes to all rows of a call, remembers their places, and returns what ``answer`` does."""

    def __init__(self, answer: Callable[[Rows], Any]) -> None:
        self.answer = answer
        self.places: list[list[int]] = []

    def __call__(self, rows: Rows) -> Any:
        self.places.append([row.place for row in rows])
        Errand.objects.filter(pk__in=[row.pk for row in rows]).update(result="worked")
        return self.answer(rows)


def bulk(make: the.Make, handle: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    """Make a processor that handles ten rows in one call, unless told otherwise."""
    return make(the.ignore, **{"process_batch": handle, "batch_size": 10, **options})


def test_process_batch_that_raises_is_asked_again_for_each_row_alone() -> None:
    the.errands(5)

    def fail(rows: Rows) -> None:
        if any(row.place == 2 for row in rows):
            raise ValueError("place 2")

    calls = Calls(fail)
    report = bulk(the.transactional, calls)()
    assert_run(report, processed=4, failed=1)
    assert calls.places == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
    assert the.places(done=True) == the.places(result="worked") == [0, 1, 3, 4]
    assert str(report.failures[0].error) == "place 2"


def test_too_few_results_flip_nothing_that_is_not_told_and_are_asked_for_one_by_one() -> None:
    the.errands(4)
    calls = Calls(lambda rows: [1 for row in rows if row.place != 2])
    report = bulk(the.transactional, calls)()
    assert_run(report, processed=3, failed=1)
    assert "one result for each of 1 rows" in str(report.failures[0].error)
    assert the.places(done=True) == the.places(result="worked") == [0, 1, 3]


ANSWERS = {
    1: ValueError("no such address"),
    2: Snooze(delay=60),
    3: Discard("moved away"),
    4: SystemExit(2),
}
#: What is found in the rows afterwards.
SAID = [
    (True, False, 0, "worked", ""),
    (False, False, 1, "worked", "ValueError: no such address"),
    (False, False, 0, "worked", ""),
    (False, True, 1, "worked", "Discard: moved away"),
    (False, False, 1, "worked", "HandlerExited"),
    (True, False, 0, "worked", ""),
]


@pytest.mark.parametrize("size", [1, 6])
def test_an_exception_in_a_rows_place_is_its_outcome_and_keeps_what_was_written(size: int) -> None:
    the.errands(6)
    calls = Calls(lambda rows: [ANSWERS.get(row.place) for row in rows])
    options: dict[str, Any] = {"failed": {"dead": True}, "retry": Retry(backoff=60)}
    report = bulk(the.transactional, calls, batch_size=size, **options)()
    assert_run(report, processed=2, failed=2, to_retry=2, snoozed=1, discarded=1)
    assert [place for call in calls.places for place in call] == list(range(6))  # no row twice
    names = ("done", "dead", "attempts", "result", "last_error")
    said = Errand.objects.order_by("place").values_list(*names)
    assert [(*row, text.partition(": expected")[0]) for *row, text in said] == SAID
    assert {type(each.error) for each in report.failures} == {ValueError, HandlerExited}


def test_an_exception_in_a_rows_place_is_the_same_when_the_batch_is_redone() -> None:
    """The flip of the last row is refused, which costs the transaction."""
    the.errands(4)
    Errand.objects.create(place=50, done=True, code="3")
    calls = Calls(lambda rows: [ANSWERS[1] if row.place == 1 else None for row in rows])
    done = {"done": lambda row: {"done": True, "code": str(row.place)}}
    assert_run(bulk(the.transactional, calls, **done)(), processed=2, failed=2)
    assert the.places(done=True) == [0, 2, 50]
    assert the.places(result="worked") == [0, 1, 2]


# --- outside a transaction: what a call returns, raises, and loses on the way


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
@pytest.mark.parametrize("answer", ["sent", {1: 1, 2: 2}, 7, iter([1, 2]), [1, 2, 3]], ids=repr)
def test_what_has_no_result_for_each_row_is_refused(make: the.Make, answer: Any) -> None:
    the.errands(2)
    report = bulk(make, Calls(lambda rows: answer), failed={"dead": True})()
    assert_run(report, failed=2)
    assert "to return None, or a list with one result" in str(report.failures[0].error)
    assert the.places(done=True) == []
    if make is the.at_least_once:  # the work may be done: no row is given up on
        assert the.places(dead=True) == []


def test_an_interrupt_in_a_call_leaves_its_rows_with_their_leases() -> None:
    """As a kill does; the rows behind them have none."""
    rows = the.errands(5)
    handle = the.raising(KeyboardInterrupt())
    run = bulk(the.at_least_once, handle, batch_size=3, retry=the.retry())
    with pytest.raises(KeyboardInterrupt):
        run()
    assert [the.untouched(row) for row in rows] == [False] * 3 + [True] * 2


def test_the_resource_is_opened_again_before_the_rows_are_called_alone() -> None:
    the.errands(4)
    opened: list[int] = []
    closed: list[int] = []

    @contextmanager
    def line() -> Iterator[bool]:
        opened.append(number := len(opened))
        try:
            yield number == 0  # the first one is broken
        finally:
            closed.append(number)

    def handle(given: Rows, is_broken: bool) -> None:
        if is_broken:
            raise ConnectionError("a broken line")

    run = bulk(the.at_least_once, handle, resource=line, retry=the.retry())
    assert_run(run(), processed=4)
    assert (opened, closed) == ([0, 1], [0, 1])


def test_rows_whose_leases_lapse_in_a_call_that_raises_are_not_called_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process was suspended: another worker may have the rows by now."""
    the.errands(3)
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)

    def sleep(rows: Rows) -> None:
        clock.passed = HOUR
        raise ValueError

    calls = Calls(sleep)
    assert_run(bulk(the.at_least_once, calls)(), lease_lost=3, redone=3)
    assert calls.places == [[0, 1, 2]]


def test_each_row_of_a_call_is_settled_with_its_own_result() -> None:
    the.errands(31)
    calls = Calls(lambda rows: [f"sent {row.place}" for row in rows])
    assert_run(bulk(the.at_least_once, calls, done=the.with_result)(), processed=31)
    said = Errand.objects.order_by("place").values_list("result", flat=True)
    assert list(said) == [f"sent {place}" for place in range(31)]
