"""Flips with another value for each row of a batch."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.utils import timezone

from tests.contract.support.parcels import flips, in_batches, parcels, statements
from tests.contract.support.reports import assert_run
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.parametrize(
    ("one", "other"), [(True, 1), (0.0, -0.0), (Decimal("1.0"), Decimal("1.00"))]
)
def test_values_that_python_calls_equal_and_the_column_does_not_are_told_apart(
    one: Any, other: Any
) -> None:
    parcels(3)
    values = ["alone", one, other]

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "note": values[row.priority]}

    assert_run(in_batches(lambda row: None, done=done)(), processed=3)
    notes = Parcel.objects.order_by("priority").values_list("note", flat=True)
    assert notes[2] == str(other)
    assert notes[1] in {str(one), "true", "1"}


def test_a_callable_gives_each_row_a_value_of_its_own() -> None:
    parcels(5)
    drawn: list[str] = []

    def draw() -> str:
        drawn.append(uuid.uuid4().hex[:20])
        return drawn[-1]

    done = {"sent": True, "code": draw}
    assert_run(in_batches(lambda row: None, done=done)(), processed=5)
    assert len(drawn) == 6  # once in the trial
    assert Parcel.objects.values("code").distinct().count() == 5


def test_a_clock_gives_all_rows_of_a_batch_one_value_in_one_statement() -> None:
    parcels(5)
    with statements() as seen:
        in_batches(lambda row: None, done={"sent": True, "sent_at": timezone.now})()
    assert len(flips(seen)) == 1
    assert Parcel.objects.values("sent_at").distinct().count() == 1
