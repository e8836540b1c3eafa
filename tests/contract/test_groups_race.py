"""Groups against sessions that lock: each interleaving that hands out two rows is forced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from itertools import product
from threading import Event
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dcl_processor import Report
from tests import seams
from tests.contract.support.clocks import Clock, Waits
from tests.contract.support.errands import elsewhere, ignore, meanwhile, only, wait
from tests.contract.support.groups import (
    MAKERS,
    SHORT_CLAIMS,
    Make,
    at_work,
    each_at_work,
    grouped,
    in_order,
    rows_of,
    run_beside,
)
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, part_locked, uncommitted
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)


@each_at_work
def test_a_head_that_a_person_has_locked_is_not_passed(delivery: str) -> None:
    one, _, other = rows_of(1, 1, 2)
    with part_locked(Errand, one.pk):
        report, handled = run_beside(in_order, delivery)
    assert handled == [other.pk]
    assert_run(report, processed=1, skipped=1, held=1)
    assert run_beside(in_order, delivery)[0].processed == 2


@pytest.mark.parametrize("make", [grouped, in_order])
def test_a_renewal_that_is_not_committed_yet_counts_as_alive(make: Make) -> None:
    one, two = rows_of(1, 1)
    Errand.objects.filter(pk=one.pk).update(leased_until=timezone.now() - timedelta(seconds=5))
    live = timezone.now() + timedelta(seconds=60)
    with uncommitted(lambda: Errand.objects.filter(pk=one.pk).update(leased_until=live)):
        report, handled = run_beside(make, "at_least_once", filter=only(two))
    assert handled == []
    assert_run(report, held=1)
    assert Errand.objects.get(pk=one.pk).leased_until is not None


@pytest.mark.parametrize("delivery", ["transactional", *SHORT_CLAIMS])
def test_a_row_that_was_moved_to_the_key_of_a_row_at_work_is_not_handled(delivery: str) -> None:
    moved, other = rows_of(1, 2)

    def move() -> None:
        elsewhere(lambda: Errand.objects.filter(pk=moved.pk).update(place=2))

    with at_work(grouped, delivery, filter=only(other)):
        with before_statement(lambda sql: " FOR NO KEY UPDATE" in sql, move):
            report, handled = run_beside(grouped, delivery)
        assert handled == []
        assert report.skipped == 1
    assert run_beside(grouped, delivery)[1] == [moved.pk]


@pytest.mark.parametrize("make", [grouped, in_order])
def test_a_key_that_another_worker_has_locked_is_visited_again(make: Make) -> None:
    one, two = rows_of(1, 1)
    waits = Event()

    class Stop(Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    def run() -> tuple[Report, list[int]]:
        return run_beside(make, "transactional", wait_for_locked=30, stop=Stop())

    with ExitStack() as after, at_work(make, "transactional", filter=only(one)):
        results = after.enter_context(meanwhile(run))
        wait(waits)
    report, handled = results[0]
    assert handled == [two.pk]
    # The other worker's row may end after the run has read it, and is stale then.
    assert_run(report, processed=1, stale=report.stale)


def key_locked(depot: Depot) -> AbstractContextManager[Callable[[], None]]:
    """Have another session lock the key; yield what lets go of it."""
    return uncommitted(lambda: by_depot().lock_key(depot))


def by_depot() -> Any:
    return processor(ignore, group_by="depot")


def test_the_wait_for_keys_does_not_begin_again_when_a_row_was_handled(clock: Clock) -> None:
    clock.monotonic = lambda: clock.passed  # type: ignore[method-assign]  # real time stands still
    kept, freed = (Depot.objects.create(name=name) for name in "ab")
    for depot in (kept, freed):
        Parcel.objects.create(depot=depot)
    with key_locked(kept), key_locked(freed) as let_go:

        class Frees(Waits):
            def wait(self, timeout: float | None = None) -> bool:
                if clock.passed > 3:
                    let_go()
                return super().wait(timeout)

        report = by_depot()(wait_for_locked=5, stop=Frees(clock))
    assert_run(report, processed=1, held=1)
    assert clock.passed <= 5 <= clock.passed + report.duration


@each_at_work
def test_a_head_that_changes_before_its_key_is_locked_comes_first(delivery: str) -> None:
    """The candidates were read before, and are a hint."""
    [two] = rows_of(1)

    def insert() -> None:
        elsewhere(lambda: Errand.objects.create(pk=two.pk - 1, place=1))

    with before_statement(lambda sql: "pg_try_advisory_xact_lock" in sql, insert):
        _, handled = run_beside(in_order, delivery)
    assert handled == []
    assert run_beside(in_order, delivery)[1] == [two.pk - 1, two.pk]


@pytest.mark.skipif(not SENDS_SEVERAL, reason="the driver sends one statement at a time")
@pytest.mark.parametrize(
    ("delivery", "option"),
    [
        *product(MAKERS, ["group_by", "in_order", "fair_by"]),
        *product(["transactional", "at_least_once"], ["max_in_flight"]),
    ],
)
def test_a_row_takes_two_messages(
    delivery: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, rows and the question, with the mark or before the work; and the end of the row."""
    seams.replace(monkeypatch, seams.IS_OBSERVED, lambda _: False)
    options: dict[str, dict[str, Any]] = {
        "group_by": {},
        "in_order": {"in_order": True},
        "fair_by": {"group_by": None, "fair_by": "place"},
        "max_in_flight": {"group_by": None, "max_in_flight": 2},
    }

    def sent(rows: int) -> int:
        Errand.objects.all().delete()
        rows_of(*[place % 2 for place in range(rows)])
        with CaptureQueriesContext(connection) as queries:
            assert grouped(delivery, ignore, **options[option])().processed == rows
        return len(queries)

    assert sent(30) - sent(10) == 2 * 20
