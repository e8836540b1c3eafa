"""``process_batch()`` outside a transaction: what a call returns, raises, and loses on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dcl_processor import BatchProcessor
from dcl_processor.engine import heartbeat
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.errands import Make
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_is_left"),
]

Rows = Sequence[Errand]


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


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
@pytest.mark.parametrize("answer", ["sent", {1: "sent", 2: "sent"}, 7, iter([1, 2])], ids=repr)
def test_what_has_no_result_for_each_row_is_refused(make: Make, answer: Any) -> None:
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


class Line(AbstractContextManager[bool]):
    """A resource; the first one is broken."""

    opened: list[Line]
    closed: list[Line]

    def __enter__(self) -> bool:
        self.opened.append(self)
        return len(self.opened) == 1

    def __exit__(self, *_: object) -> None:
        self.closed.append(self)


def test_the_resource_is_opened_again_before_the_rows_are_called_alone() -> None:
    the.errands(4)
    Line.opened, Line.closed = [], []

    def handle(given: Rows, is_broken: bool) -> None:
        if is_broken:
            raise ConnectionError("a broken line")

    run = bulk(the.at_least_once, handle, resource=Line, retry=the.retry())
    assert_run(run(), processed=4)
    assert (len(Line.opened), Line.closed) == (2, Line.opened)


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
