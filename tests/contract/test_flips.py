"""What a batch's flips write, and to which rows."""

from __future__ import annotations

import asyncio
import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from dcl_processor.exceptions import InvalidDone, StillPending
from tests.contract.support import errands as the
from tests.contract.support.batches import flips, note, sent, statements, worked
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_one_flip_statement_is_sent_for_each_set_of_columns() -> None:
    parcels(10)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        late = {"note": "late"} if row.priority > 6 else {}
        return {"sent": True, "weight": row.priority % 3, "sent_at": Now(), **late}

    with statements() as seen:
        assert_run(in_batches(lambda row: None, done=done)(), processed=10)
    # The first row is alone, until its flip is written; the others share a batch.
    assert len([sql for sql in seen if sql.startswith("UPDATE") and "weight" in sql]) == 1 + 2
    rows = Parcel.objects.exclude(sent_at=None).order_by("priority")
    assert list(rows.values_list("weight", flat=True)) == [0, *[1, 2, 0] * 3]


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


def test_a_callable_gives_each_row_a_value_of_its_own_and_a_clock_one_to_all() -> None:
    parcels(5)
    done = {"sent": True, "code": lambda: uuid.uuid4().hex[:20], "sent_at": timezone.now}
    assert_run(in_batches(lambda row: None, done=done)(), processed=5)
    assert Parcel.objects.values("code").distinct().count() == 5
    assert Parcel.objects.values("sent_at").distinct().count() == 1

    Parcel.objects.update(sent=False)
    with statements() as seen:
        in_batches(lambda row: None, done={"sent": True, "sent_at": timezone.now})()
    assert len(flips(seen)) == 1


def test_an_expression_in_the_flip_is_each_rows_own() -> None:
    parcels(3)
    done = {"sent": True, "weight": F("priority") * 10}
    assert_run(in_batches(lambda row: None, done=done)(), processed=3)
    assert list(Parcel.objects.order_by("pk").values_list("weight", flat=True)) == [0, 10, 20]


def test_a_get_done_that_raises_is_its_rows_failure_alone() -> None:
    parcels(3)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": {0: True, 2: True}[row.priority]}

    report = in_batches(note, done=done)()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, InvalidDone)
    assert isinstance(report.failures[0].error.__cause__, KeyError)
    assert sent() == worked() == [0, 2]


def test_a_flip_that_breaks_a_constraint_is_its_rows_failure_alone() -> None:
    parcels(3)
    Parcel.objects.create(sent=True, code="1", priority=50)

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "code": str(row.priority)}

    report = in_batches(note, done=done)()
    assert_run(report, processed=2, failed=1)
    assert isinstance(report.failures[0].error, IntegrityError)
    assert worked() == [0, 2]
    assert sent() == [0, 2, 50]


def test_one_row_that_stays_pending_costs_the_others_nothing() -> None:
    parcels(4)

    def handle(row: Parcel) -> None:
        if row.priority != 1:
            Parcel.objects.filter(pk=row.pk).update(sent=True)

    report = in_batches(handle, done=None)()
    assert_run(report, processed=3, failed=1)
    assert isinstance(report.failures[0].error, StillPending)
    assert sent() == [0, 2, 3]


def test_rows_that_all_stay_pending_end_the_run_at_the_second() -> None:
    parcels(50)
    calls: list[int] = []
    report = in_batches(lambda row: calls.append(row.priority), done=None)()
    assert_run(report, failed=2, stopped="failures")
    # One by one, since only after each it can be asked; and the second anywhere.
    assert len(calls) == len(set(calls)) == 2
    assert calls[0] == 0


class Vector(list[int]):
    """Compares element by element, as numpy's arrays do, and is as shy of repr()."""

    __hash__ = None

    def __eq__(self, other: object) -> Any:
        return Vector([1, 0])

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a vector is ambiguous")

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __str__(self) -> str:
        return "-".join(map(str, [*self]))


class Stamp:
    """A callable that equals all of its kind, and so has no hash."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp)

    __hash__ = None  # type: ignore[assignment]  # what Python makes of it

    def __call__(self) -> str:
        return f"stamp {self.place}"


def make_vector(place: int) -> Any:
    return Vector([place, place])


@pytest.mark.parametrize(
    ("make", "texts"),
    [(make_vector, ["0-0", "1-1", "2-2"]), (Stamp, ["stamp 0", "stamp 1", "stamp 2"])],
)
@pytest.mark.parametrize("size", [1, 3])
def test_values_are_not_compared(make: Any, texts: list[str], size: int) -> None:
    """``==`` and ``hash()`` are the users' own, and need not work."""
    parcels(3)
    calls: list[int] = []

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        calls.append(row.priority)
        return {"sent": True, "note": make(row.priority)}

    report = in_batches(lambda row: None, done=done, batch_size=size)()
    assert_run(report, processed=3)
    assert sorted(calls) == [0, 1, 2]
    assert list(Parcel.objects.order_by("priority").values_list("note", flat=True)) == texts


@pytest.mark.parametrize("make", [make_vector, Stamp])
def test_nor_are_they_where_asynchronous_handlers_end_together(make: Any) -> None:
    rows = the.errands(3)

    async def handle(row: Any) -> None:
        await asyncio.sleep(0)

    run = the.at_least_once(
        handle, done=lambda row, result: {"done": True, "result": make(1)}, batch_size=3
    )
    report = run(concurrency=3)
    assert_run(report, processed=3)
    text = "stamp 1" if make is Stamp else "1-1"
    assert {the.state(row)["result"] for row in rows} == {text}


def test_an_unhashable_callable_is_called_for_each_row() -> None:
    parcels(4)
    report = in_batches(lambda row: None, done={"sent": True, "note": Stamp(7)}, batch_size=2)()
    assert_run(report, processed=4)
    assert set(Parcel.objects.values_list("note", flat=True)) == {"stamp 7"}


# A trigger that drops the flip of one row without an error. MariaDB's cannot.
DROPS: dict[str, tuple[list[str], list[str]]] = {
    "postgresql": (
        [
            """CREATE FUNCTION tests_drop() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN IF OLD.priority = 1 THEN RETURN NULL; END IF; RETURN NEW; END $$""",
            """CREATE TRIGGER tests_drop BEFORE UPDATE ON tests_parcel
            FOR EACH ROW EXECUTE FUNCTION tests_drop()""",
        ],
        ["DROP TRIGGER tests_drop ON tests_parcel", "DROP FUNCTION tests_drop"],
    ),
    "sqlite": (
        [
            """CREATE TRIGGER tests_drop BEFORE UPDATE ON tests_parcel WHEN OLD.priority = 1
            BEGIN SELECT RAISE(IGNORE); END""",
        ],
        ["DROP TRIGGER tests_drop"],
    ),
}

if connection.vendor in DROPS:

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_a_flip_that_a_trigger_drops_fails_its_row(batch_size: int) -> None:
        parcels(3)
        makes, removes = DROPS[connection.vendor]
        with connection.cursor() as cursor:
            for sql in makes:
                cursor.execute(sql)
        try:
            report = in_batches(lambda row: None, batch_size=batch_size)()
        finally:
            with connection.cursor() as cursor:
                for sql in removes:
                    cursor.execute(sql)
        assert_run(report, processed=2, failed=1)
        assert "look for a trigger" in str(report.failures[0].error)
        assert sent() == [0, 2]
