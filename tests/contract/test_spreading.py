"""What a copy does that has met another one: it goes elsewhere, and misses nothing."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dcl_processor.pending import scan
from tests.contract.support.parcels import parcels, processor
from tests.contract.support.reports import assert_run
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WINDOW", 4)
    monkeypatch.setattr(scan, "WIDE_WINDOW", 6)


def finish(pk: int) -> None:
    Parcel.objects.using("other").filter(pk=pk).update(sent=True)


@pytest.mark.parametrize("meets_at", [0, 3, 4, 9, 28])
def test_every_row_is_visited_once_wherever_the_other_copy_is_met(meets_at: int) -> None:
    pks = [row.pk for row in parcels(30)]
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        if len(calls) == meets_at + 1 and connection.features.has_select_for_update:
            waiting = Parcel.objects.using("other").filter(sent=False).exclude(pk=row.pk)
            finish(waiting.order_by("pk").values_list("pk", flat=True)[0])

    report = processor(handle)()
    finished = 1 if connection.features.has_select_for_update else 0
    assert len(calls) == len(set(calls)) == 30 - finished
    # Where a window ends with the row, the next one is read without the other copy's.
    stale = finished if meets_at != 3 else 0
    assert_run(report, processed=30 - finished, stale=stale)
    assert not Parcel.objects.filter(pk__in=pks, sent=False).exists()


def test_rows_that_fail_are_not_tried_again_by_a_copy_that_went_elsewhere() -> None:
    """More of them than a window holds, at the head, where each new look begins."""
    pks = [row.pk for row in parcels(30)]
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        if len(calls) == 1 and connection.features.has_select_for_update:
            finish(pks[1])
        if row.priority < 20:
            raise ValueError

    report = processor(handle)()
    assert len(calls) == len(set(calls)) >= 29
    assert report.failed + report.processed + report.stale == 30
    stale = 30 - len(calls)
    assert_run(report, processed=10, failed=20 - stale, stale=stale)


def test_a_lone_copy_keeps_its_order_and_never_looks_twice() -> None:
    parcels(12)
    places: list[int] = []
    run = processor(lambda row: places.append(row.priority))
    with CaptureQueriesContext(connection) as queries:
        run()
    assert places == list(range(12))
    reads = [q["sql"] for q in queries if "LIMIT 4" in q["sql"] or "LIMIT 6" in q["sql"]]
    assert len(reads) == 4  # three full windows, and one that is empty
    assert not any("LIMIT 6" in read for read in reads)
