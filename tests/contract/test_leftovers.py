"""Handlers that leave a transaction open where none belongs: nothing is settled in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction

from dcl_processor import Retry
from dcl_processor.exceptions import TransactionLeftOpen
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import execute
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def begin_past_django() -> None:
    connection.ensure_connection()
    connection.connection.cursor().execute("BEGIN")


LEAVES: dict[str, Callable[[], Any]] = {
    "BEGIN": lambda: execute("BEGIN"),
    "autocommit off": lambda: transaction.set_autocommit(False),
    "a block never left": lambda: transaction.atomic().__enter__(),
}
if connection.vendor != "mysql":  # whose driver does not know of a transaction
    LEAVES["BEGIN past Django"] = begin_past_django
if connection.vendor == "mysql":
    LEAVES["the server's autocommit off"] = lambda: execute("SET autocommit = 0")
    LEAVES["START TRANSACTION"] = lambda: execute("/* as ever */ start transaction")
leaves = pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)

leasing: Any = partial(the.at_least_once, retry=Retry(backoff=600))
MAKERS: dict[str, Any] = {
    "at most once": partial(the.at_most_once, claim=None, claimed_at=None),
    "at most once, claimed": the.at_most_once,
    "at least once": leasing,
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    yield
    connection.close()


@pytest.mark.parametrize("batch_size", [1, 4])
@each
@leaves
def test_the_row_that_left_a_transaction_open_fails_and_the_others_are_committed(
    leave: Callable[[], Any], make: the.Make, batch_size: int
) -> None:
    the.errands(4)
    Parcel.objects.create()
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place in {0, 2}:
            leave()
            Parcel.objects.update(note=f"row {row.place}")

    run = make(handle, batch_size=batch_size)
    report = run()
    assert calls == [0, 1, 2, 3]
    assert_run(report, processed=2, failed=2, to_retry=2 if run.retry else 0)
    assert {type(failure.error) for failure in report.failures} == {TransactionLeftOpen}
    assert not connection.in_atomic_block
    assert connection.get_autocommit()
    # What another session sees is committed.
    assert Parcel.objects.using("other").get().note == ""
    rows = Errand.objects.using("other").order_by("place")
    flipped = not (run.claim or run.lease)
    assert list(rows.values_list("done", flat=True)) == [flipped, True, flipped, True]
    if run.claim:
        with connections["other"].cursor():  # by the database's clock, and by that session
            doubtful = run.in_doubt(older_than=timedelta(0)).using("other")
        assert sorted(doubtful.values_list("place", flat=True)) == [0, 2]
    if run.lease:
        assert list(rows.values_list("attempts", flat=True)) == [1, 0, 1, 0]
        assert set(rows.values_list("leased_until", flat=True)) == {None}


# --- asynchronous handlers, on the connection that they share


async def work(row: Errand) -> None:
    await Errand.objects.filter(pk=row.pk).aupdate(result="worked")


def worked() -> list[int]:
    """Return the places of the rows whose work another session sees."""
    rows = Errand.objects.using("other").filter(result="worked").order_by("place")
    return list(rows.values_list("place", flat=True))


class Shared:
    """Begins a transaction for the row at place 0, in which the row at place 1 works as well."""

    def __init__(self) -> None:
        self.began, self.other_worked = asyncio.Event(), asyncio.Event()

    async def __call__(self, row: Errand) -> None:
        async with asyncio.timeout(the.PATIENCE):
            if row.place == 0:
                await sync_to_async(execute)("BEGIN")
                self.began.set()
                await work(row)
                await self.other_worked.wait()
            elif row.place == 1:
                await self.began.wait()
                await work(row)
                self.other_worked.set()
            else:
                await work(row)


# SQLite has one writer: while that transaction is open, the run can claim no other row.
if connection.features.has_select_for_update:

    def test_all_rows_that_worked_in_a_transaction_that_is_left_open_fail() -> None:
        """Also the one that ends when it was rolled back."""
        rows = the.errands(4)
        report = leasing(Shared().__call__)(concurrency=2)
        assert_run(report, processed=2, failed=2, to_retry=2)
        assert {type(failure.error) for failure in report.failures} == {TransactionLeftOpen}
        assert {failure.pk for failure in report.failures} == {row.pk for row in rows[:2]}
        assert worked() == [2, 3]
