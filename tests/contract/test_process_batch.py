"""``process_batch()``: all rows of a batch at once, and one by one when it raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dcl_processor import BatchProcessor, Discard, Retry, Snooze
from dcl_processor.exceptions import HandlerExited
from tests.contract.support import errands as the
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.parcels import parcels
from tests.contract.support.reports import assert_run
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class Together(BatchProcessor[Parcel]):
    """Handles its rows by ``process_batch()``, and remembers the places it was called with."""

    done = {"sent": True}
    batch_size = 100

    def __init__(self, bad: Sequence[int] = (), **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[list[int]] = []
        self.bad = bad

    def pending(self) -> Any:
        return Parcel.objects.filter(sent=False)

    def process_batch(self, rows: Sequence[Parcel], /, *arguments: Any) -> Sequence[Any] | None:
        self.calls.append([row.priority for row in rows])
        for row in rows:
            note(row)
            if row.priority in self.bad:
                raise ValueError(f"place {row.priority}")
        return None


def test_process_batch_that_raises_is_asked_again_for_each_row_alone() -> None:
    parcels(5)
    run = Together(bad=[2])
    report = run()
    assert_run(report, processed=4, failed=1)
    assert run.calls == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
    assert sent() == worked() == [0, 1, 3, 4]
    assert str(report.failures[0].error) == "place 2"


def test_too_many_results_flip_nothing() -> None:
    parcels(2)

    class Doubling(Together):
        def process_batch(self, rows: Sequence[Parcel], /, *arguments: Any) -> Sequence[int]:
            return [1 for row in rows for _ in range(2)]

    report = Doubling()()
    assert_run(report, failed=2)
    assert "one result for each of 1 rows, got 2" in str(report.failures[0].error)
    assert sent() == []


def test_too_few_results_flip_nothing_that_is_not_told_and_are_asked_for_one_by_one() -> None:
    parcels(4)

    class Forgetful(Together):
        def process_batch(self, rows: Sequence[Parcel], /, *arguments: Any) -> Sequence[int]:
            for row in rows:
                note(row)
            return [1 for row in rows if row.priority != 2]

    report = Forgetful()()
    assert_run(report, processed=3, failed=1)
    assert "one result for each of 1 rows, got 0" in str(report.failures[0].error)
    assert sent() == worked() == [0, 1, 3]


class Answers(BatchProcessor[Errand]):
    """Returns what its rows' places stand for, and writes for every row."""

    done = {"done": True}
    failed = {"dead": True}
    retry = Retry(backoff=60)
    batch_size = 10

    def __init__(self, answers: dict[int, Any], **options: Any) -> None:
        super().__init__(**options)
        self.answers = answers
        self.calls: list[list[int]] = []

    def pending(self) -> Any:
        return Errand.objects.filter(done=False, dead=False)

    def process_batch(self, rows: Sequence[Errand], /, *arguments: Any) -> Sequence[Any]:
        self.calls.append([row.place for row in rows])
        Errand.objects.filter(pk__in=[row.pk for row in rows]).update(result="worked")
        return [self.answers.get(row.place) for row in rows]


def said() -> list[tuple[Any, ...]]:
    rows = Errand.objects.order_by("place")
    return list(rows.values_list("done", "dead", "attempts", "result", "last_error"))


ANSWERS = {
    1: ValueError("no such address"),
    2: Snooze(delay=60),
    3: Discard("moved away"),
    4: SystemExit(2),
}
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
    run = Answers(ANSWERS, batch_size=size)
    report = run()
    counts = (report.processed, report.failed, report.snoozed, report.discarded)
    assert counts == (2, 2, 1, 1)
    assert [place for call in run.calls for place in call] == list(range(6))  # no row twice
    assert [(*row, text.partition(": expected")[0]) for *row, text in said()] == SAID
    assert {type(each.error) for each in report.failures} == {ValueError, HandlerExited}


def test_an_exception_in_a_rows_place_is_the_same_when_the_batch_is_redone() -> None:
    """The flip of the last row is refused, which costs the transaction."""
    the.errands(4)
    Errand.objects.create(place=50, done=True, code="3")

    class Coded(Answers):
        def get_done(self, row: Errand, result: Any, /) -> dict[str, Any]:
            return {"done": True, "code": str(row.place)}

    run = Coded({1: ValueError("no such address")}, retry=None, failed=None)
    report = run()
    assert_run(report, processed=2, failed=2)
    assert [row[0] for row in said()] == [True, False, True, False, True]
    assert [row[3] for row in said()] == ["worked", "worked", "worked", "", ""]
