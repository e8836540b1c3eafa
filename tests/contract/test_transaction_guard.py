"""No flip is committed without the work, and none without the lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q, Value
from django.db.models.functions import Repeat

from dcl_processor import Retry, batch_processor
from dcl_processor.exceptions import TransactionLost
from tests.contract.support import errands as the
from tests.contract.support.parcels import parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import execute
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def run(handle: Callable[[Parcel], Any], **options: Any) -> Any:
    pending = Parcel.objects.filter(sent=False)
    return batch_processor(**{"pending": pending, "done": {"sent": True}, **options})(handle)()


def work(row: Parcel) -> None:
    Parcel.objects.filter(pk=row.pk).update(note="worked")


def reconnect() -> None:
    connection.close()
    connection.connect()


ENDS: dict[str, Callable[[], Any]] = {
    "raw rollback": lambda: execute("ROLLBACK"),
    "raw commit": lambda: execute("COMMIT"),
    "the driver's rollback": lambda: connection.connection.rollback(),  # noqa: PLW0108  # late
    "the driver's commit": lambda: connection.connection.commit(),  # noqa: PLW0108  # late
    "a new connection": reconnect,
}
if connection.vendor == "mysql":
    ENDS["a table made"] = lambda: execute("CREATE TABLE tests_fence (a int)")


def drive(*statements: str) -> None:
    """Go past Django, to the driver."""
    cursor = connection.connection.cursor()
    for sql in statements:
        cursor.execute(sql)
    cursor.close()


def then_a_query(end: str) -> None:
    Depot.objects.count()  # the row's savepoint, which would be refused afterwards
    getattr(connection.connection, end)()
    Depot.objects.count()


# What ends the transaction and begins another one at once, which looks like the first.
REPLACES: dict[str, Callable[[], Any]] = {
    "BEGIN past Django": lambda: drive("COMMIT", "BEGIN"),
    "BEGIN past Django, after a rollback": lambda: drive("ROLLBACK", "BEGIN"),
}
if connection.vendor != "sqlite":
    REPLACES |= {
        "the driver's commit, and a query": lambda: then_a_query("commit"),
        "the driver's rollback, and a query": lambda: then_a_query("rollback"),
        "commit and chain": lambda: execute("COMMIT AND CHAIN"),
        "rollback and chain": lambda: execute("ROLLBACK AND CHAIN"),
    }
if connection.vendor == "postgresql":
    REPLACES["in one message"] = lambda: execute("COMMIT; BEGIN")


@pytest.fixture(autouse=True)
def _no_table() -> Any:
    yield
    if connection.vendor == "mysql":
        execute("DROP TABLE IF EXISTS tests_fence")


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_handler_that_ends_the_transaction_gets_no_flip(
    end: Callable[[], Any], batch_size: int
) -> None:
    Parcel.objects.bulk_create([Parcel(), Parcel()])

    def handle(row: Parcel) -> None:
        work(row)
        end()

    report = run(handle, batch_size=batch_size)
    assert_run(report, failed=2)
    assert not Parcel.objects.filter(sent=True).exists()
    assert not connection.in_atomic_block


def own_table() -> Any:
    return Parcel.objects.filter(sent=False)


def spanning() -> Any:
    return Parcel.objects.filter(sent=False, depot__open=True)


@pytest.mark.parametrize("pending", [own_table, spanning])
@pytest.mark.parametrize("replace", REPLACES.values(), ids=REPLACES)
def test_a_row_whose_transaction_was_replaced_is_another_copys(
    replace: Callable[[], Any], pending: Callable[[], Any]
) -> None:
    """The first row of a run is claimed like the others, and rehearsed with besides."""
    depot = Depot.objects.create()
    Parcel.objects.bulk_create([Parcel(depot=depot, priority=place) for place in range(3)])
    handled: list[tuple[str, int]] = []
    reports: list[Any] = []

    def other(row: Parcel) -> None:
        handled.append(("other", row.priority))

    def handle(row: Parcel) -> None:
        handled.append(("first", row.priority))
        if row.priority == 1:
            replace()
            alone = batch_processor(pending=pending, done={"sent": True})(other)
            reports.append(alone(using="other", filter=Q(pk=row.pk)))

    report = batch_processor(pending=pending, done={"sent": True})(handle)()
    [others] = reports
    assert handled == [("first", 0), ("first", 1), ("other", 1), ("first", 2)]
    assert_run(others, processed=1)
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert isinstance(failure.error, TransactionLost)
    assert not Parcel.objects.filter(sent=False).exists()


def flips_by_itself(row: Parcel) -> None:
    Parcel.objects.filter(pk=row.pk).update(sent=True)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("done", [{"sent": True}, {"sent": True, "note": lambda: "x"}, None])
@pytest.mark.parametrize("replace", REPLACES.values(), ids=REPLACES)
def test_a_replaced_transaction_gets_no_flip(
    replace: Callable[[], Any], done: Any, batch_size: int
) -> None:
    parcels(3)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if done is None:
            flips_by_itself(row)
        if row.priority == 1:
            replace()

    report = run(handle, done=done, batch_size=batch_size)
    # What a handler flipped in its code and another one committed is stale when it is redone.
    assert report.processed + report.stale == 2
    assert_run(report, processed=report.processed, failed=1, stale=report.stale)
    assert isinstance(report.failures[0].error, TransactionLost)
    assert calls.count(1) <= 2  # with others in its batch, once more alone
    if done is not None:
        left = Parcel.objects.filter(sent=False).values_list("priority", flat=True)
        assert list(left) == [1]
    assert not connection.in_atomic_block


@pytest.mark.parametrize("replace", REPLACES.values(), ids=REPLACES)
def test_a_replaced_transaction_counts_one_attempt(replace: Callable[[], Any]) -> None:
    the.errands(3)

    def handle(row: Errand) -> None:
        if row.place == 1:
            replace()

    report = the.transactional(handle, retry=Retry(backoff=60))()
    assert_run(report, processed=2, failed=1, to_retry=1)
    assert isinstance(report.failures[0].error, TransactionLost)
    rows = Errand.objects.order_by("place").values_list("done", "attempts")
    assert list(rows) == [(True, 0), (False, 1), (True, 0)]


ENDS_LATE: dict[str, dict[str, Any]] = {
    "a done function": {"done": lambda row, result: {"sent": True, "note": end_it()}},
    "a value's callable": {"done": lambda row, result: {"sent": True, "note": end_it}},
    "an expression of one row": {
        "done": lambda row, result: {"sent": True, "note": Repeat(Value(end_it()), 1)}
    },
    "a plain done's callable": {"done": {"sent": True, "note": lambda: end_it()}},  # noqa: PLW0108  # late
}
ends_it: list[Callable[[], Any]] = []


def end_it() -> str:
    for each in ends_it:
        each()
    return "done"


@pytest.mark.parametrize("options", ENDS_LATE.values(), ids=ENDS_LATE)
@pytest.mark.parametrize("end", [ENDS["raw commit"], REPLACES["BEGIN past Django"]])
def test_a_flip_whose_values_end_the_transaction_is_not_written(
    end: Callable[[], Any], options: dict[str, Any]
) -> None:
    """The values are made after the handler, and before the last look at the transaction."""
    parcels(3)

    def handle(row: Parcel) -> None:
        ends_it[:] = [end] if row.priority == 1 else []

    try:
        report = run(handle, **options)
    finally:
        ends_it.clear()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, TransactionLost)
    assert list(Parcel.objects.filter(sent=False).values_list("priority", flat=True)) == [1]
