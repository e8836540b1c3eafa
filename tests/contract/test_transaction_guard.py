"""No flip is committed without the work, and none without the lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Value
from django.db.models.functions import Repeat

from dcl_processor.exceptions import TransactionLost
from tests.contract.support.parcels import parcels, processor
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import execute
from tests.models import Depot, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def reconnect() -> None:
    connection.close()
    connection.connect()


#: What ends the transaction, and begins none.
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


#: What ends the transaction and begins another one at once, which looks like the first.
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


FLIPS: dict[str, dict[str, Any]] = {
    "constant": {},
    "computed": {"done": {"sent": True, "note": lambda: "x"}},
    "the handler's own": {"done": None},
    "spanning": {"pending": Parcel.objects.exclude(scans__ok=True).filter(sent=False)},
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("options", FLIPS.values(), ids=FLIPS)
@pytest.mark.parametrize("replace", [*ENDS.values(), *REPLACES.values()], ids=[*ENDS, *REPLACES])
def test_a_replaced_transaction_gets_no_flip(
    replace: Callable[[], Any], options: dict[str, Any], batch_size: int
) -> None:
    parcels(3)
    calls: list[int] = []
    is_own = options == {"done": None}

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if is_own:
            Parcel.objects.filter(pk=row.pk).update(sent=True)
        if row.priority == 1:
            replace()

    report = processor(handle, batch_size=batch_size, **options)()
    # What a handler flipped in its code and another one committed is stale when it is redone.
    assert report.processed + report.stale == 2
    assert_run(report, processed=report.processed, failed=1, stale=report.stale)
    assert isinstance(report.failures[0].error, TransactionLost)
    assert calls.count(1) <= 2  # with others in its batch, once more alone
    if not is_own:
        left = Parcel.objects.filter(sent=False).values_list("priority", flat=True)
        assert list(left) == [1]
    assert not connection.in_atomic_block


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
        report = processor(handle, **options)()
    finally:
        ends_it.clear()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, TransactionLost)
    assert list(Parcel.objects.filter(sent=False).values_list("priority", flat=True)) == [1]
