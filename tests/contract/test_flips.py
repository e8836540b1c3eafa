"""What a batch's flips write, and to which rows."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import IntegrityError
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from dcl_processor.exceptions import InvalidDone, StillPending
from tests.contract.batches import (
    flips,
    in_batches,
    note,
    parcels,
    sent,
    statements,
    worked,
)
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_one_flip_statement_is_sent_for_each_set_of_values() -> None:
    parcels(10)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "weight": row.priority % 3, "sent_at": Now()}

    with statements() as seen:
        assert in_batches(lambda row: None, done=done)().processed == 10
    # The first row is alone, until its flip is written; the others share a batch.
    assert len([sql for sql in seen if sql.startswith("UPDATE") and "weight" in sql]) == 1 + 3
    rows = Parcel.objects.exclude(sent_at=None).order_by("priority")
    assert list(rows.values_list("weight", flat=True)) == [0, *[1, 2, 0] * 3]


def test_values_that_python_calls_equal_and_the_column_does_not_are_told_apart() -> None:
    parcels(3)
    values = ["alone", True, 1]

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "note": values[row.priority]}

    assert in_batches(lambda row: None, done=done)().processed == 3
    notes = Parcel.objects.order_by("priority").values_list("note", flat=True)
    assert notes[2] == "1"
    assert notes[1] in {"True", "true", "1"}


def test_a_callable_gives_each_row_a_value_of_its_own_and_a_clock_one_to_all() -> None:
    parcels(5)
    done = {"sent": True, "code": lambda: uuid.uuid4().hex[:20], "sent_at": timezone.now}
    assert in_batches(lambda row: None, done=done)().processed == 5
    assert Parcel.objects.values("code").distinct().count() == 5
    assert Parcel.objects.values("sent_at").distinct().count() == 1

    Parcel.objects.update(sent=False)
    with statements() as seen:
        in_batches(lambda row: None, done={"sent": True, "sent_at": timezone.now})()
    assert len(flips(seen)) == 1


def test_an_expression_in_the_flip_is_each_rows_own() -> None:
    parcels(3)
    done = {"sent": True, "weight": F("priority") * 10}
    assert in_batches(lambda row: None, done=done)().processed == 3
    assert list(Parcel.objects.order_by("pk").values_list("weight", flat=True)) == [0, 10, 20]


def test_a_get_done_that_raises_is_its_rows_failure_alone() -> None:
    parcels(3)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": {0: True, 2: True}[row.priority]}

    report = in_batches(note, done=done)()
    assert (report.processed, report.failed) == (2, 1)
    assert isinstance(report.failures[0].error, InvalidDone)
    assert isinstance(report.failures[0].error.__cause__, KeyError)
    assert sent() == worked() == [0, 2]


def test_a_flip_that_breaks_a_constraint_is_its_rows_failure_alone() -> None:
    parcels(3)
    Parcel.objects.create(sent=True, code="1", priority=50)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "code": str(row.priority)}

    report = in_batches(note, done=done)()
    assert (report.processed, report.failed) == (2, 1)
    assert isinstance(report.failures[0].error, IntegrityError)
    assert worked() == [0, 2]
    assert sent() == [0, 2, 50]


def test_one_row_that_stays_pending_costs_the_others_nothing() -> None:
    parcels(4)

    def handle(row: Parcel) -> None:
        if row.priority != 1:
            Parcel.objects.filter(pk=row.pk).update(sent=True)

    report = in_batches(handle, done=None)()
    assert (report.processed, report.failed, report.stopped) == (3, 1, "drained")
    assert isinstance(report.failures[0].error, StillPending)
    assert sent() == [0, 2, 3]


def test_rows_that_all_stay_pending_end_the_run_at_the_second() -> None:
    parcels(50)
    calls: list[int] = []
    report = in_batches(lambda row: calls.append(row.priority), done=None)()
    assert (report.processed, report.failed, report.stopped) == (0, 2, "failures")
    # One by one, since only after each it can be asked; and the second anywhere.
    assert len(calls) == len(set(calls)) == 2
    assert calls[0] == 0
