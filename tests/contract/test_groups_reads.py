"""How much of a key a run reads, and what its report counts of rows that others have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet
from django.utils import timezone

from dcl_processor.insights.rows import Row, show
from tests.contract.support import errands as the
from tests.contract.support.errands import elsewhere, ignore
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.groups import (
    MAKERS,
    Make,
    at_work,
    each_at_work,
    grouped,
    in_order,
    rows_of,
    run_beside,
)
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import part_locked
from tests.models import Errand, Parcel, Tag

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


fail = the.raising(ValueError("no such place"))


def test_rows_of_a_key_that_fail_are_each_tried_once_in_a_run() -> None:
    rows_of(*[1] * 300)
    options: dict[str, Any] = {"batch_size": 100, "max_consecutive_failures": 0}
    assert_run(grouped("transactional", fail, **options)(), failed=300)


def test_rows_that_are_given_up_let_those_behind_them_go_on() -> None:
    rows_of(*[1] * 30)
    report = in_order("transactional", fail, failed={"dead": True}, max_consecutive_failures=0)()
    assert_run(report, failed=30)


def tagged(number: int, **columns: Any) -> QuerySet[Parcel]:
    """Make parcels that match their pending queryset five times each."""
    tags = [Tag.objects.create(name="x") for _ in range(5)]
    for _ in range(number):
        Parcel.objects.create(**columns).tags.set(tags)
    return Parcel.objects.filter(sent=False, tags__name="x")


def test_rows_that_match_several_times_are_all_tried() -> None:
    pending = tagged(60, weight=1)
    options: dict[str, Any] = {"max_consecutive_failures": 0, "batch_size": 60}
    report = processor(fail, pending=pending, group_by="weight", **options)()
    assert_run(report, failed=60)


def test_held_rows_that_match_several_times_are_counted_once() -> None:
    pending = tagged(3, weight=1)
    report = processor(fail, pending=pending, group_by="weight", in_order=True)()
    assert_run(report, failed=1, held=2)


@each_at_work
@pytest.mark.parametrize("make", [grouped, in_order])
def test_a_row_that_another_session_finished_is_stale(delivery: str, make: Make) -> None:
    one, two, three = rows_of(1, 1, 1)
    handled: list[int] = []

    def finish_the_next(row: Errand) -> None:
        handled.append(row.pk)
        if row.pk == one.pk:
            elsewhere(lambda: Errand.objects.filter(pk=two.pk).update(done=True))

    assert_run(make(delivery, finish_the_next)(), processed=2, stale=1)
    assert handled == [one.pk, three.pk]


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("delivery", MAKERS)
    @pytest.mark.parametrize(("make", "processed"), [(grouped, 1), (in_order, 0)])
    def test_a_row_that_another_session_has_locked_is_skipped(
        delivery: str, make: Make, processed: int
    ) -> None:
        one, _ = rows_of(1, 1)
        with part_locked(Errand, one.pk):
            report, _ = run_beside(make, delivery)
        assert_run(report, processed=processed, skipped=1, held=1 - processed)


def test_rows_of_a_batch_that_was_rolled_back_are_counted_once() -> None:
    """Otherwise the run would stop as many rows too early, and say that it is drained."""
    rows = rows_of(*[1] * 250)

    def flip(row: Errand) -> dict[str, Any]:
        return {"done": True, "result": None if row.pk == rows[20].pk else ""}

    report = grouped("transactional", ignore, done=flip, batch_size=100)()
    assert_run(report, processed=249, failed=1)
    assert not Errand.objects.filter(done=False).exclude(pk=rows[20].pk).exists()


# --- what is known of rows that are in groups


def is_held(processor: Any, rows: list[Errand]) -> list[bool]:
    """Return for each row whether the answer says that it waits for its key."""
    return [shown(processor, row).parts["held"] for row in rows]


def shown(processor: Any, row: Errand) -> Row:
    found = show(processor, row.pk).value
    assert found is not None
    return found


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_row_at_work_is_in_the_way_of_the_others_of_its_group(delivery: str) -> None:
    rows = rows_of(1, 1, 2)
    processor = grouped(delivery, the.ignore)
    with at_work(grouped, delivery, filter=the.only(rows[0])):
        assert is_held(processor, rows) == [False, True, False]
        assert shown(processor, rows[1]).reason.startswith("it waits for its key")
        assert is_held(grouped(delivery, the.ignore, max_per_group=2), rows) == [False] * 3
    assert is_held(processor, rows) == [False] * 3


def test_a_lapsed_lease_is_in_the_way_of_no_row() -> None:
    until = timezone.now() - timedelta(days=1)
    rows = rows_of(1, 1)
    Errand.objects.filter(pk=rows[0].pk).update(leased_until=until)
    assert is_held(grouped("at_least_once", the.ignore), rows) == [False, False]
