"""An ``order_by()`` of ``pending`` means what it says; without one, rows come by primary key."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import pytest
from django.db import connection

from dcl_processor import batch_processor
from tests.contract.support.errands import PENDING, all_deliveries, only
from tests.contract.support.groups import Make, at_work, each_at_work, grouped, rows_of, run_beside
from tests.contract.support.reports import assert_run
from tests.models import Depot, Errand, Visit

pytestmark = pytest.mark.django_db(transaction=True)

#: More rows than a window has.
MANY = 520

URGENT_FIRST = PENDING.order_by("-place")


@all_deliveries
def test_the_order_holds_over_the_whole_backlog(make: Any) -> None:
    rows_of(*range(MANY))
    places: list[int] = []

    def handler(row: Errand) -> None:
        places.append(row.place)

    first = make(handler, pending=URGENT_FIRST)
    assert_run(first(limit=2), processed=2, stopped="limit")
    others = make(handler, pending=URGENT_FIRST, batch_size=100)
    assert_run(others(), processed=MANY - 2)
    assert places == [*reversed(range(MANY))]
    assert not Errand.objects.exclude(done=True, leased_until=None).exists()


#: Groups are refused on MariaDB.
IN_A_KEY = [{"group_by": "done"}] if connection.vendor != "mysql" else []


@pytest.mark.parametrize("options", [{}, *IN_A_KEY], ids=str)
def test_the_order_of_the_model_does_not_count(options: dict[str, Any]) -> None:
    depots = [Depot.objects.create(name=name) for name in "cab"]
    rows = [Visit.objects.create(depot=depot, at=at) for depot in depots for at in (1, 2)]
    assert [*Visit.objects.all()] != rows
    calls: list[int] = []
    pending = Visit.objects.filter(done=False)
    run = batch_processor(pending=pending, done={"done": True}, **options)
    assert_run(run(lambda row: calls.append(row.pk))(), processed=6)
    assert calls == [row.pk for row in rows]


def test_rows_that_fail_at_the_head_do_not_keep_the_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda number: number // 2)
    rows_of(*range(200))
    places: list[int] = []

    def fail(row: Errand) -> None:
        places.append(row.place)
        if row.place >= 140:
            raise ValueError

    report = batch_processor(pending=URGENT_FIRST, done={"done": True})(fail)()
    assert_run(report, processed=140, failed=60)
    # After 25 failures from the middle of those that are left, and then round to the others.
    assert places == [*range(199, 174, -1), *range(87, -1, -1), *range(174, 87, -1)]
    assert not Errand.objects.filter(done=False, place__lt=140).exists()


@each_at_work
def test_a_second_worker_goes_on_in_the_order(delivery: str) -> None:
    rows = rows_of(*range(5))
    make: Make = partial(grouped, group_by=None, pending=URGENT_FIRST)
    with at_work(make, delivery, filter=only(rows[4])):
        report, handled = run_beside(make, delivery)
    skipped = 1 if delivery == "transactional" else 0
    assert_run(report, processed=4, skipped=skipped)
    assert handled == [rows[place].pk for place in (3, 2, 1, 0)]
