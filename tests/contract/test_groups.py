"""Groups in one run: one after another, in order, and what holds a key."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from datetime import date
from typing import Any

import pytest
from django.db.models import F
from django.db.models.functions import Lower

from dcl_processor.exceptions import InvalidOption, InvalidPending
from tests.contract.support.errands import ignore, proven
from tests.contract.support.groups import MAKERS, grouped, in_order, rows_of
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.models import Depot, Errand, Parcel, Sample, Seat
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

each = pytest.mark.parametrize("delivery", MAKERS)


@each
def test_the_order_is_that_of_the_queryset(delivery: str) -> None:
    rows = rows_of(1, 1, 1)
    Errand.objects.filter(pk=rows[2].pk).update(code="a")
    Errand.objects.filter(pk=rows[1].pk).update(code="c")
    Errand.objects.filter(pk=rows[0].pk).update(code="b")
    handled: list[Any] = []
    pending = Errand.objects.filter(done=False, claimed=False).order_by("-code")
    in_order(delivery, lambda row: handled.append(row.code), pending=pending)()
    assert handled == ["c", "b", "a"]


@each
def test_a_head_that_fails_holds_its_key_alone(delivery: str) -> None:
    one, two, other = rows_of(1, 1, 2)
    handled: list[Any] = []

    def fail(row: Errand) -> None:
        handled.append(row.pk)
        if row.pk == one.pk:
            raise ValueError

    report = in_order(delivery, fail)(wait_for_locked=0)
    assert_run(report, processed=1, failed=1, held=1)
    assert sorted(handled) == [one.pk, other.pk]
    assert not Errand.objects.get(pk=two.pk).done


def test_a_relation_is_a_key_and_its_null_is_none() -> None:
    depots = [Depot.objects.create(name=name) for name in "ab"]
    for depot in (*depots, None, depots[0], None):
        Parcel.objects.create(depot=depot)
    handled: list[Any] = []
    report = processor(lambda row: handled.append(row.depot_id), group_by="depot", in_order=True)()
    assert_run(report, processed=5)
    assert Counter(handled) == Counter([depots[0].pk, depots[0].pk, depots[1].pk, None, None])


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_key_waits_for_no_handler_of_another_key(delivery: str) -> None:
    """Although the first rows of both were claimed together, after that of another key."""
    rows_of(0, 1, 2, 1)
    goes_on: asyncio.Event | None = None
    handled: list[int] = []

    async def handle(row: Errand) -> None:
        nonlocal goes_on
        goes_on = goes_on or asyncio.Event()
        if row.place == 2:
            async with asyncio.timeout(PATIENCE):
                await goes_on.wait()
        handled.append(row.place)
        if sorted(handled) == [0, 1, 1]:
            goes_on.set()

    run = proven(in_order(delivery, handle))
    handled.clear()
    goes_on = None
    assert_run(run(concurrency=3), processed=4)
    assert handled[-1] == 2


def test_an_empty_table_is_one_read(django_assert_num_queries: Any) -> None:
    processor = in_order("transactional", ignore)
    processor()
    with django_assert_num_queries(1):
        assert_run(processor())


@pytest.mark.parametrize("column", ["nothing", "price", "ratio", "hour", "data"])
def test_columns_that_cannot_be_a_key_are_refused(column: str) -> None:
    pending = Sample.objects.filter(done=False)
    with pytest.raises(InvalidOption, match=f"group_by='{column}' to name a column"):
        grouped("transactional", ignore, pending=pending, group_by=column)()


@pytest.mark.parametrize("column", ["token", "day", "word", "colour", "depot", "depot_id"])
def test_keys_of_these_types_are_found_again(column: str) -> None:
    depot = Depot.objects.create(name="a")
    values: dict[str, Any] = {
        "token": uuid.uuid4(),
        "day": date(2024, 2, 29),
        "word": "Ä\0b".replace("\0", " "),
        "colour": "blue",
        "depot": depot,
        "depot_id": depot.pk,
    }
    for _ in range(2):
        Sample.objects.create(**{column: values[column]})
    pending = Sample.objects.filter(done=False)
    report = grouped("transactional", ignore, pending=pending, group_by=column, in_order=True)()
    assert_run(report, processed=2)


@pytest.mark.parametrize("order", ["?", "depot", "depot__name", Lower("note"), F("priority")])
def test_orders_that_are_not_by_own_columns_are_refused(order: Any) -> None:
    Parcel.objects.create()
    pending = Parcel.objects.filter(sent=False).order_by(order)
    with pytest.raises(InvalidPending, match=r"to be ordered by columns of tests\.Parcel itself"):
        processor(ignore, pending=pending, group_by="weight", in_order=True)()


@pytest.mark.parametrize("make", [grouped, in_order])
@pytest.mark.parametrize("further", [0, 1])
def test_i6_rows_that_keep_arriving_do_not_keep_a_run_going(make: Any, further: int) -> None:
    """In the same key, or in one behind it."""
    rows_of(1, 2, 1)
    report = make("transactional", lambda row: Errand.objects.create(place=row.place + further))(
        timeout=30
    )
    assert report.stopped == "drained"
    assert report.processed <= 2 * 3
    assert Errand.objects.filter(done=False).exists()


@pytest.mark.django_db
@each
@pytest.mark.parametrize("make", [grouped, in_order])
def test_inside_a_test_case_keys_work_as_well(delivery: str, make: Any) -> None:
    rows_of(1, 2, 1)
    assert_run(make(delivery, ignore)(), processed=3)


@pytest.mark.parametrize("option", ["group_by", "fair_by"])
def test_keys_of_rows_with_a_composite_primary_key_are_refused(option: str) -> None:
    Seat.objects.create(row=1, number=1)
    seats = Seat.objects.filter(sent=False)
    with pytest.raises(InvalidOption, match=f"a primary key of one column for {option}"):
        processor(ignore, pending=seats, **{option: "row"})()
    assert Seat.objects.filter(sent=False).exists()


@pytest.mark.parametrize("order", [False, True])
def test_questions_that_span_tables_have_keys(order: bool) -> None:
    depots = [Depot.objects.create(name=name, open=name != "c") for name in "abc"]
    for depot in depots * 2:
        Parcel.objects.create(depot=depot)
    pending = Parcel.objects.filter(sent=False, depot__open=True).select_related("depot")
    report = processor(ignore, pending=pending, group_by="depot", in_order=order)()
    assert_run(report, processed=4)
