"""I7: a batch of rows in one transaction, and what a row that fails costs the others."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction

from tests.contract.support.parcels import (
    flips,
    in_batches,
    note,
    parcels,
    savepoints,
    sent,
    statements,
    worked,
)
from tests.contract.support.reports import assert_run
from tests.models import Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_a_batch_is_one_lock_one_flip_and_no_savepoint_for_handlers_without_the_database() -> None:
    parcels(100)
    with statements() as seen:
        assert_run(in_batches(lambda row: None)(), processed=100)
    assert savepoints(seen) == []
    assert len(flips(seen)) == 1
    # Candidates, settings of the transaction, rehearsal, lock, flip: none of them once per row.
    # MariaDB is asked, too, whether the caller has a transaction open, and what the session sees.
    assert len(seen) <= {"mysql": 15, "sqlite": 13}.get(connection.vendor, 12)
    assert sent() == list(range(100))


def test_i7_a_row_that_raises_loses_its_own_work_and_no_other_rows() -> None:
    Parcel.objects.create(priority=9, code="taken", sent=True)
    parcels(5)

    def handle(row: Parcel) -> None:
        note(row)
        Scan.objects.create(parcel=row)
        if row.priority in (0, 2):
            raise ValueError(row.priority)
        if row.priority == 4:  # PostgreSQL has broken the transaction off; elsewhere it goes on
            Parcel.objects.filter(pk=row.pk).update(code="taken")

    report = in_batches(handle)()
    assert_run(report, processed=2, failed=3)
    assert worked() == [1, 3]
    assert sent() == [1, 3, 9]
    assert list(Scan.objects.order_by("pk").values_list("parcel__priority", flat=True)) == [1, 3]
    errors = [failure.error for failure in report.failures]
    assert [type(each) for each in errors] == [ValueError, ValueError, IntegrityError]


def test_i7_callbacks_of_a_failed_row_are_dropped_and_those_before_and_behind_it_run() -> None:
    parcels(5)
    ran: list[tuple[int, str]] = []

    def handle(row: Parcel) -> None:
        transaction.on_commit(lambda: ran.append((row.priority, "before")))
        note(row)
        with transaction.atomic():
            transaction.on_commit(lambda: ran.append((row.priority, "nested")))
        transaction.on_commit(lambda: ran.append((row.priority, "after")))
        if row.priority in (1, 4):
            raise ValueError

    report = in_batches(handle)()
    assert_run(report, processed=3, failed=2)
    assert ran == [(place, when) for place in (0, 2, 3) for when in ("before", "nested", "after")]


@pytest.mark.parametrize(
    "error",
    [ValueError("the callback's own"), SystemExit("the callback's own")],
    ids=["error", "exit"],
)
def test_i7_a_callback_that_raises_drops_none_of_the_other_rows(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    parcels(4)
    ran: list[int] = []

    def handle(row: Parcel) -> None:
        def callback() -> None:
            ran.append(row.priority)
            if row.priority == 1:
                raise error

        transaction.on_commit(callback)

    report = in_batches(handle)()
    assert_run(report, processed=4)
    assert ran == sent() == [0, 1, 2, 3]
    assert sum("the callback's own" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("batch_size", [1, 100])
def test_i7_a_deferred_foreign_key_that_row_2_of_3_broke_costs_rows_1_and_3_nothing(
    batch_size: int,
) -> None:
    """Found out at COMMIT, or at the insert where constraints cannot be deferred."""
    parcels(3)
    ran: list[int] = []

    def handle(row: Parcel) -> None:
        transaction.on_commit(lambda: ran.append(row.priority))
        note(row)
        if row.priority == 1:
            Scan.objects.create(parcel_id=10**9)

    report = in_batches(handle, batch_size=batch_size)()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, IntegrityError)
    assert sent() == worked() == ran == [0, 2]
    assert not Scan.objects.exists()


def test_ten_thousand_rows_behind_a_poison_row_are_done_in_one_run() -> None:
    parcels(10_000)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if row.priority == 0:
            raise ValueError("poison")

    report = in_batches(handle)()
    assert_run(report, processed=9_999, failed=1)
    assert len(calls) == len(set(calls)) == 10_000
    assert Parcel.objects.filter(sent=False).values_list("priority", flat=True)[:2].get() == 0
