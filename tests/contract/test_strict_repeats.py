"""``strict_order`` over rows that stay pending: each is handled once in a run, in the order."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import F

from dcl_processor import Snooze
from dcl_processor.candidates import scan
from tests.contract.support.parcels import parcels, processor
from tests.contract.support.reports import assert_run
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

ALL = Parcel.objects.order_by("-priority")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WINDOW", 3)


def checked(handler: Any, **options: Any) -> Any:
    """Make a processor whose rows all stay pending, the most urgent ones first."""
    options = {"pending": ALL, "done": {"tries": F("tries") + 1}, **options}
    return processor(handler, strict_order=True, repeats=True, **options)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_each_row_is_handled_once_in_each_run_and_in_the_order(size: int) -> None:
    parcels(20)
    for _ in range(2):
        places: list[int] = []
        report = checked(lambda row: places.append(row.priority), batch_size=size)()  # noqa: B023  # of this run
        assert_run(report, processed=20)
        assert places == [*reversed(range(20))]
    assert {*Parcel.objects.values_list("tries", flat=True)} == {2}


def test_rows_that_fail_or_are_snoozed_stay_at_the_head_and_block_nothing() -> None:
    parcels(12)
    places: list[int] = []

    def handle(row: Parcel) -> None:
        places.append(row.priority)
        if row.priority > 9:
            raise Snooze if row.priority == 11 else ValueError

    assert_run(checked(handle)(), processed=10, failed=1, snoozed=1)
    assert places == [*reversed(range(12))]
