"""How many rows wait for a run, and how each database tells."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from dcl_processor import BatchProcessor, batch_processor
from dcl_processor.insights.answer import Answer, How
from dcl_processor.insights.backlog_size import Size, size
from tests.models import Depot, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 1_000


def opener() -> BatchProcessor[Depot]:
    @batch_processor(pending=lambda: Depot.objects.filter(open=True), done={"open": False})
    def close(depot: Depot) -> None: ...

    return close


def analyze(table: str) -> None:
    verb = {"mysql": "ANALYZE TABLE"}.get(connection.vendor, "ANALYZE")
    with connection.cursor() as cursor:
        cursor.execute(f"{verb} {table}")


def test_a_number_up_to_the_limit_is_exact_and_not_estimated() -> None:
    Depot.objects.bulk_create(Depot(open=number < 10) for number in range(20))
    assert size(opener(), most=10) == Size(Answer(10))


def test_above_the_limit_the_planner_is_asked_if_there_is_one() -> None:
    Depot.objects.bulk_create(Depot(open=True) for _ in range(ROWS))
    analyze("tests_depot")
    found = size(opener(), most=10)
    assert found.counted == Answer(10, How.MORE_THAN)
    assert found.least == 11
    if connection.vendor == "sqlite":
        assert (found.estimate, found.basis) == (None, None)
    else:
        assert found.estimate is not None
        assert 0.8 < found.estimate / ROWS < 1.2
        assert found.basis is not None
        assert size(opener(), most=10).basis == found.basis


def test_a_row_with_several_matches_is_counted_once() -> None:
    @batch_processor(pending=lambda: Parcel.objects.filter(scans__ok=True), done={"sent": True})
    def check(parcel: Parcel) -> None: ...

    parcels = [Parcel.objects.create() for _ in range(4)]
    Scan.objects.bulk_create(Scan(parcel=parcel) for parcel in parcels for _ in range(3))
    analyze("tests_scan")
    assert size(check) == Size(Answer(4))
    found = size(check, most=2)
    assert found.counted == Answer(2, How.MORE_THAN)
    # Joined rows and a DISTINCT make the estimate worse, and never an error.
    assert (found.estimate is None) == (connection.vendor == "sqlite")


def test_a_question_without_rows_is_counted_as_none() -> None:
    @batch_processor(pending=Depot.objects.none, done={"open": False})
    def never(depot: Depot) -> None: ...

    assert size(never) == Size(Answer(0))


def test_no_transaction_is_left_open() -> None:
    Depot.objects.bulk_create(Depot(open=True) for _ in range(5))
    size(opener(), most=2)
    assert not connection.in_atomic_block
    with transaction.atomic():
        assert Depot.objects.count() == 5
