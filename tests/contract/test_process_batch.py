"""``process_batch()``: all rows of a batch at once, and one by one when it raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from django.db import connection

from dcl_processor import BatchProcessor, Retry
from tests.contract.batches import (
    note,
    parcels,
    sent,
    worked,
)
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


def test_process_batch_gets_all_rows_at_once() -> None:
    parcels(5)
    run = Together()
    assert run().processed == 5
    assert run.calls == [[0, 1, 2, 3, 4]]
    assert sent() == worked() == [0, 1, 2, 3, 4]


def test_process_batch_that_raises_is_asked_again_for_each_row_alone() -> None:
    parcels(5)
    run = Together(bad=[2])
    report = run()
    assert (report.processed, report.failed) == (4, 1)
    assert run.calls == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]
    assert sent() == worked() == [0, 1, 3, 4]
    assert str(report.failures[0].error) == "place 2"


def test_the_results_of_process_batch_reach_the_flip_in_the_order_of_the_rows() -> None:
    parcels(4)

    class Weigh(Together):
        def process_batch(self, rows: Sequence[Parcel], /, *arguments: Any) -> Sequence[int]:
            return [row.priority * 7 for row in rows]

        def get_done(self, row: Parcel, result: int, /) -> dict[str, Any]:
            return {"sent": True, "weight": result}

    assert Weigh()().processed == 4
    assert list(Parcel.objects.order_by("pk").values_list("weight", flat=True)) == [0, 7, 14, 21]


def test_too_few_results_flip_nothing_that_is_not_told_and_are_asked_for_one_by_one() -> None:
    parcels(4)

    class Forgetful(Together):
        def process_batch(self, rows: Sequence[Parcel], /, *arguments: Any) -> Sequence[int]:
            for row in rows:
                note(row)
            return [1 for row in rows if row.priority != 2]

    report = Forgetful()()
    assert (report.processed, report.failed) == (3, 1)
    assert "one result for each of 1 rows, got 0" in str(report.failures[0].error)
    assert sent() == worked() == [0, 1, 3]


def test_process_batch_and_retry_count_the_attempt_of_the_row_to_blame() -> None:
    Errand.objects.bulk_create([Errand(place=place) for place in range(3)])

    class Run(BatchProcessor[Errand]):
        done = {"done": True}
        retry = Retry(backoff=60)
        batch_size = 10

        def pending(self) -> Any:
            return Errand.objects.filter(done=False)

        def process_batch(self, rows: Sequence[Errand], /, *arguments: Any) -> None:
            for row in rows:
                Errand.objects.filter(pk=row.pk).update(result="worked")
                if row.place == 1:
                    raise ValueError("bad")

    report = Run()()
    assert (report.processed, report.failed) == (2, 1)
    rows = Errand.objects.order_by("place").values_list("done", "attempts", "result", "last_error")
    assert list(rows) == [
        (True, 0, "worked", ""),
        (False, 1, "", "ValueError: bad"),
        (True, 0, "worked", ""),
    ]


def test_an_interrupt_in_process_batch_rolls_it_back_and_ends_the_run() -> None:
    parcels(3)

    class Interrupted(Together):
        def process_batch(self, rows: Sequence[Parcel], /, *arguments: Any) -> None:
            note(rows[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted()()
    assert (sent(), worked()) == ([], [])
    assert connection.execute_wrappers == []
