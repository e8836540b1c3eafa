"""``process_batch()``: all rows of a batch at once, and one by one when it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcl_processor import BatchProcessor, Discard, Retry, Snooze
from dcl_processor.exceptions import HandlerExited
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

Rows = list[Errand]


def together(
    answer: Callable[[Rows], Any], calls: list[list[int]] | None = None, **options: Any
) -> BatchProcessor[Errand]:
    """Make a processor that writes to all rows of a call, and returns what ``answer`` does."""

    def handle(rows: Rows) -> Any:
        (calls if calls is not None else []).append([row.place for row in rows])
        Errand.objects.filter(pk__in=[row.pk for row in rows]).update(result="worked")
        return answer(rows)

    return the.transactional(the.ignore, **{"process_batch": handle, "batch_size": 10, **options})


def test_process_batch_that_raises_is_asked_again_for_each_row_alone() -> None:
    the.errands(5)
    calls: list[list[int]] = []

    def fail(rows: Rows) -> None:
        if any(row.place == 2 for row in rows):
            raise ValueError("place 2")

    report = together(fail, calls)()
    assert_run(report, processed=4, failed=1)
    assert calls == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
    assert the.places(done=True) == the.places(result="worked") == [0, 1, 3, 4]
    assert str(report.failures[0].error) == "place 2"


def test_too_many_results_flip_nothing() -> None:
    the.errands(2)
    report = together(lambda rows: [1] * 2 * len(rows))()
    assert_run(report, failed=2)
    assert "one result for each of 1 rows" in str(report.failures[0].error)
    assert the.places(done=True) == []


def test_too_few_results_flip_nothing_that_is_not_told_and_are_asked_for_one_by_one() -> None:
    the.errands(4)
    report = together(lambda rows: [1 for row in rows if row.place != 2])()
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
    calls: list[list[int]] = []
    options: dict[str, Any] = {"failed": {"dead": True}, "retry": Retry(backoff=60)}
    run = together(
        lambda rows: [ANSWERS.get(row.place) for row in rows], calls, batch_size=size, **options
    )
    report = run()
    assert_run(report, processed=2, failed=2, to_retry=2, snoozed=1, discarded=1)
    assert [place for call in calls for place in call] == list(range(6))  # no row twice
    names = ("done", "dead", "attempts", "result", "last_error")
    said = Errand.objects.order_by("place").values_list(*names)
    assert [(*row, text.partition(": expected")[0]) for *row, text in said] == SAID
    assert {type(each.error) for each in report.failures} == {ValueError, HandlerExited}


def test_an_exception_in_a_rows_place_is_the_same_when_the_batch_is_redone() -> None:
    """The flip of the last row is refused, which costs the transaction."""
    the.errands(4)
    Errand.objects.create(place=50, done=True, code="3")
    run = together(
        lambda rows: [ANSWERS[1] if row.place == 1 else None for row in rows],
        done=lambda row: {"done": True, "code": str(row.place)},
    )
    assert_run(run(), processed=2, failed=2)
    assert the.places(done=True) == [0, 2, 50]
    assert the.places(result="worked") == [0, 1, 2]
