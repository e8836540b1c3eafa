"""Groups beside a worker that has a row of the key, or whose lease has lapsed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.utils import timezone

from dcl_processor.exceptions import InvalidOption, OutsideTransaction
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.errands import elsewhere, ignore, meanwhile, only
from tests.contract.support.gate import HAS_ROW_LOCKS
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
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.models import Depot, Errand
from tests.waiting import Barrier

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@each_at_work
@pytest.mark.parametrize("make", [grouped, in_order])
def test_no_sibling_of_a_row_at_work_is_handled(delivery: str, make: Make) -> None:
    one, two, other = rows_of(1, 1, 2)
    with at_work(make, delivery, filter=only(one)):
        report, handled = run_beside(make, delivery)
        assert handled == [other.pk]
        assert_run(report, processed=1, held=1 if delivery != "transactional" else 2)
    assert not Errand.objects.get(pk=two.pk).done


@each_at_work
def test_a_lower_key_that_is_committed_late_waits_for_the_row_at_work(delivery: str) -> None:
    two, three = rows_of(1, 1)
    with at_work(in_order, delivery, filter=only(two)) as first:
        late = Errand.objects.create(pk=two.pk - 1, place=1)
        _, handled = run_beside(in_order, delivery)
        assert handled == []
    _, handled = run_beside(in_order, delivery)
    assert [*first, *handled] == [two.pk, late.pk, three.pk]


@pytest.mark.parametrize("delivery", SHORT_CLAIMS)
def test_a_row_that_is_moved_to_another_key_while_in_flight_counts_in_the_new_one(
    delivery: str,
) -> None:
    one, sibling, new = rows_of(1, 1, 2)
    with at_work(grouped, delivery, filter=only(one)):
        Errand.objects.filter(pk=one.pk).update(place=2)
        report, handled = run_beside(grouped, delivery)
        assert handled == [sibling.pk]
        assert_run(report, processed=1, held=1)
    _, handled = run_beside(grouped, delivery)
    assert handled == [new.pk]


@pytest.mark.parametrize("make", [grouped, in_order])
def test_a_lapsed_lease_of_a_row_that_is_not_pending_any_more_holds_no_key(make: Make) -> None:
    """A worker has died with it, and a person has taken it out of pending since."""
    _, other, cancelled = rows_of(1, 1, 1)
    lapsed = timezone.now() - timedelta(seconds=5)
    Errand.objects.filter(pk__in=[other.pk, cancelled.pk]).update(leased_until=lapsed)
    Errand.objects.filter(pk=cancelled.pk).update(dead=True, result="by hand")
    handled: list[int] = []
    run = make(
        "at_least_once",
        lambda row: handled.append(row.pk),
        pending=Errand.objects.filter(done=False, dead=False),
        claim={"result": "packing"},
        reset={"dead": False, "result": ""},
    )
    assert_run(run(), processed=2)
    cancelled.refresh_from_db()
    assert (cancelled.dead, cancelled.result) == (True, "by hand")
    assert cancelled.pk not in handled


@each_at_work
def test_a_filtered_run_does_not_pass_a_row_that_it_leaves_out(delivery: str) -> None:
    one, two = rows_of(1, 1)
    report, handled = run_beside(in_order, delivery, filter=only(two))
    assert handled == []
    assert_run(report, held=1)
    assert run_beside(in_order, delivery, filter=only(one))[1] == [one.pk]
    assert run_beside(in_order, delivery, filter=only(two))[1] == [two.pk]


@each_at_work
def test_as_many_rows_of_a_key_are_in_flight_as_may_be(delivery: str) -> None:
    rows = rows_of(1, 1, 1, 2)

    with (
        at_work(two_at_once, delivery, filter=only(rows[0])),
        at_work(two_at_once, delivery, filter=only(rows[1])),
    ):
        report, handled = run_beside(two_at_once, delivery)
        assert handled == [rows[3].pk]
        assert report.held >= 1
    assert run_beside(two_at_once, delivery)[1] == [rows[2].pk]


@each_at_work
@pytest.mark.parametrize("make", [grouped, in_order])
def test_a_row_that_was_done_since_it_was_read_does_not_hold_its_key(
    delivery: str, make: Make
) -> None:
    """This worker had the lock of the key: another one that missed it may have ended meanwhile."""
    one, two, *_ = rows = rows_of(1, 2, 1, 2)

    def handler(row: Errand) -> None:
        if not handled:
            other = two if row.place == 1 else one
            elsewhere(lambda: Errand.objects.filter(pk=other.pk).update(done=True))
        handled.append(row.pk)

    handled: list[int] = []
    assert_run(make(delivery, handler)(wait_for_locked=0), processed=3, stale=1)
    assert {*handled} < {row.pk for row in rows}


# --- the lock of a key for producers: what they insert under it is in order with the work


def two_at_once(delivery: str, handler: Any) -> Any:
    return grouped(delivery, handler, max_per_group=2)


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("make", [grouped, in_order])
    def test_a_producer_waits_for_the_row_at_work_and_sees_what_it_did(make: Make) -> None:
        one, _ = rows_of(1, 1)
        seen: list[int] = []

        def produce() -> None:
            with transaction.atomic():
                make("transactional", ignore).lock_key(1)
                seen.append(Errand.objects.filter(done=True).count())

        with at_work(make, "transactional", filter=only(one)):
            producer = meanwhile(produce)
            results = producer.__enter__()
            wait_until_a_session_waits()
            assert seen == []
        producer.__exit__(None, None, None)
        assert (seen, results) == ([1], [None])

    @pytest.mark.parametrize("delivery", MAKERS)
    @pytest.mark.parametrize("make", [grouped, in_order, two_at_once])
    def test_no_row_of_a_key_is_handled_while_a_producer_has_it(delivery: str, make: Make) -> None:
        one, other = rows_of(1, 2)
        with transaction.atomic():
            make(delivery, ignore).lock_key(1)
            earlier = Errand.objects.create(pk=one.pk - 1, place=1)
            report, handled = elsewhere(lambda: run_beside(make, delivery))
            assert handled == [other.pk]
            assert_run(report, processed=1, held=1)
        assert run_beside(make, delivery)[1] == [earlier.pk, one.pk]

    def test_two_handlers_of_a_key_do_not_wait_for_each_other() -> None:
        """Each has one of the two locks of the key, and would wait for the other's."""
        rows_of(1, 1)
        both_are_at_work = Barrier(2)

        def handler(_: Errand) -> None:
            both_are_at_work.wait()
            errands.lock_key(1)

        errands = two_at_once("transactional", handler)
        with meanwhile(lambda: errands(limit=1)) as reports:
            reports.append(errands(limit=1))
        assert [report.failed for report in reports] == [1, 1]
        for report in reports:
            error = str(report.failures[0].error)
            assert "lock_key() outside the handlers of a processor" in error


else:

    def test_a_producer_has_the_lock_of_the_whole_database() -> None:
        with transaction.atomic():
            in_order("transactional", ignore).lock_key(1)
            other = connections.create_connection("default")
            try:
                with other.cursor() as cursor:
                    cursor.execute("PRAGMA busy_timeout = 0")
                    with pytest.raises(OperationalError, match="locked"):
                        cursor.execute("BEGIN IMMEDIATE")
            finally:
                other.close()


@pytest.mark.parametrize(
    ("delivery", "make", "done"),
    [
        ("transactional", two_at_once, False),
        ("transactional", grouped, True),
        ("at_least_once", two_at_once, True),
    ],
)
def test_a_handler_may_lock_the_key_that_no_other_handler_can_have(
    delivery: str, make: Make, done: bool
) -> None:
    rows_of(1)

    def handler(_: Errand) -> None:
        with transaction.atomic():
            errands.lock_key(1)

    errands = make(delivery, handler)
    report = errands()
    assert (report.processed, report.failed) == ((1, 0) if done else (0, 1))


def test_the_lock_needs_a_transaction() -> None:
    with pytest.raises(OutsideTransaction, match=r"lock_key\(\) inside transaction.atomic\(\)"):
        grouped("transactional", ignore).lock_key(1)


@pytest.mark.parametrize(
    ("column", "key", "words"),
    [
        (None, 1, "expected group_by=… for lock_key"),
        ("nothing", 1, "group_by='nothing' to name a column"),
        ("depot", Depot(), "to take a key, or a saved row, got <Depot"),
        ("depot", None, "to take a key, or a saved row, got None"),
    ],
)
def test_keys_that_their_column_cannot_have_are_refused(
    column: str | None, key: Any, words: str
) -> None:
    with transaction.atomic(), pytest.raises(InvalidOption, match=words):
        processor(ignore, group_by=column).lock_key(key)
