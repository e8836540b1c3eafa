"""Keys that are locked by their related row, on every database with row locks, and on SQLite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

from dcl_processor import BatchProcessor, Delivery, Lease, Report
from dcl_processor.checks import check_found
from dcl_processor.exceptions import InvalidOption, Unsupported
from dcl_processor.registry import Found
from tests.contract.support.deadlocks import wait_until_a_session_waits
from tests.contract.support.errands import elsewhere, ignore, meanwhile, only
from tests.contract.support.gate import HAS_GATE, HAS_ROW_LOCKS
from tests.contract.support.groups import after_first, at_work, grouped, rows_of, run_beside
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, part_locked
from tests.models import Depot, Errand, Parcel, Ride, Vehicle

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LEASED: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "pending": Parcel.objects.filter(sent=False, note=""),
    "claim": {"note": "at work"},
    "claimed_at": "sent_at",
    "done": {"sent": True, "note": ""},
}
DELIVERIES = {"at_least_once": LEASED, "at_most_once": CLAIMED}

each = pytest.mark.parametrize("delivery", DELIVERIES)
both = pytest.mark.parametrize("order", [False, True], ids=["grouped", "in order"])


def by_depot(
    delivery: str, handler: Callable[..., Any] = ignore, **options: Any
) -> BatchProcessor[Parcel]:
    given = {"group_by": "depot", "lock_related": True, **DELIVERIES[delivery], **options}
    return processor(handler, **given)


def parcels_of(*places: int) -> tuple[list[Depot], list[Any]]:
    """Make depots, and a parcel of the depot at each place given."""
    depots = [Depot.objects.create(name=str(place)) for place in range(max(places) + 1)]
    return depots, [Parcel.objects.create(depot=depots[place]) for place in places]


def keyed(order: bool) -> Any:
    return partial(by_depot, in_order=order)


def rides_of(relation: str) -> tuple[list[Any], list[Ride]]:
    """Make two rows of the relation, each with a part in several tables and a ride of its own."""
    model: Any = Ride._meta.get_field(relation).related_model
    Vehicle.objects.create()  # so that the keys of a trailer's two parts differ
    related = [model.objects.create(), model.objects.create()]
    return related, [Ride.objects.create(**{relation: each}) for each in related]


def by_relation(relation: str, handler: Callable[..., Any] = ignore) -> BatchProcessor[Any]:
    rides: dict[str, Any] = {"pending": Ride.objects.filter(sent=False), **LEASED}
    return processor(handler, group_by=relation, lock_related=True, **rides)


@pytest.mark.parametrize("relation", ["truck", "trailer", "train"])
def test_a_key_whose_related_row_has_several_parts_is_handled(relation: str) -> None:
    _, rides = rides_of(relation)
    assert_run(by_relation(relation)(), processed=len(rides))


if HAS_ROW_LOCKS:

    def is_key_lock(sql: str) -> bool:
        return "tests_depot" in sql and " FOR " in sql

    @each
    @both
    def test_a_row_claimed_just_before_the_key_is_locked_is_seen(
        delivery: str, order: bool
    ) -> None:
        """The look at the siblings comes after the lock, in a statement of its own."""
        _, (one, _two) = parcels_of(0, 0)
        started: list[Any] = []

        def claim_the_first() -> None:
            work = at_work(keyed(order), delivery, filter=only(one))
            started.extend([work, work.__enter__()])

        try:
            with before_statement(is_key_lock, claim_the_first):
                report, handled = run_beside(keyed(order), delivery)
            assert handled == []
            assert report.held > 0
        finally:
            started[0].__exit__(None, None, None)

    @each
    @both
    def test_a_key_that_is_locked_and_not_looked_at_yet_is_busy(delivery: str, order: bool) -> None:
        parcels_of(0, 0)
        reports: list[tuple[Report, list[int]]] = []

        def run_another() -> None:
            reports.append(elsewhere(lambda: run_beside(keyed(order), delivery)))

        with before_statement(after_first(is_key_lock), run_another):
            report, handled = run_beside(keyed(order), delivery)
        assert_run(report, processed=2)
        assert len(handled) == 2
        assert_run(reports[0][0], held=2)
        assert reports[0][1] == []

    @each
    @both
    def test_no_row_of_a_key_is_handled_while_a_producer_has_it(delivery: str, order: bool) -> None:
        depots, (one, other) = parcels_of(0, 1)
        with transaction.atomic():
            by_depot(delivery).lock_key(depots[0])
            earlier = Parcel.objects.create(pk=one.pk - 1, depot=depots[0])
            report, handled = elsewhere(lambda: run_beside(keyed(order), delivery))
            assert handled == [other.pk]
            assert_run(report, processed=1, held=1)
        assert run_beside(keyed(order), delivery)[1] == [earlier.pk, one.pk]

    def test_a_key_without_a_row_cannot_be_locked() -> None:
        with transaction.atomic(), pytest.raises(InvalidOption, match="which no row has"):
            by_depot("at_least_once").lock_key(1)


if HAS_GATE:

    @each
    def test_rows_of_a_key_are_inserted_while_it_is_locked(delivery: str) -> None:
        """Their foreign keys are checked at once; the lock of the related row is that of no key."""
        depots, _ = parcels_of(0, 0)

        def insert() -> None:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '2s'")
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
                Parcel.objects.create(depot=depots[0])

        with before_statement(after_first(is_key_lock), lambda: elsewhere(insert)):
            report, _ = run_beside(keyed(order=False), delivery)
        assert report.processed >= 2
        assert Parcel.objects.count() == 3

    def test_a_producer_waits_for_the_related_row() -> None:
        depots, _ = parcels_of(0)
        got: list[str] = []

        def produce() -> None:
            with transaction.atomic():
                by_depot("at_least_once").lock_key(depots[0])
                got.append("locked")

        with part_locked(Depot, depots[0].pk):
            producer = meanwhile(produce)
            results = producer.__enter__()
            wait_until_a_session_waits()
            assert got == []
        producer.__exit__(None, None, None)
        assert (got, results) == (["locked"], [None])


def test_transactional_is_refused() -> None:
    with pytest.raises(Unsupported, match="AT_MOST_ONCE or AT_LEAST_ONCE with lock_related"):
        processor(ignore, group_by="depot", lock_related=True)


def test_a_key_without_a_related_row_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"a foreign key with lock_related.*got a IntegerField"):
        grouped("at_least_once", ignore, lock_related=True)()


def test_a_foreign_key_that_the_database_does_not_enforce_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key whose row is gone could never be locked."""
    monkeypatch.setattr(Parcel._meta.get_field("depot"), "db_constraint", False)
    with pytest.raises(InvalidOption, match="a ForeignKey with db_constraint=False"):
        by_depot("at_least_once")()


if connection.vendor == "mysql":
    # It has no lock of a key for one transaction.

    def test_group_by_is_refused_before_any_row() -> None:
        rows_of(1)
        with pytest.raises(Unsupported, match="expected PostgreSQL or SQLite for group_by"):
            grouped("transactional", ignore)()
        assert not Errand.objects.filter(done=True).exists()

    def test_the_lock_of_a_key_is_refused_as_well() -> None:
        with (
            transaction.atomic(),
            pytest.raises(Unsupported, match="PostgreSQL or SQLite for group_by"),
        ):
            grouped("transactional", ignore).lock_key(1)

    def test_the_check_refuses_a_key_unless_it_is_locked_by_its_related_row() -> None:
        for run, is_refused in (
            (grouped("transactional", ignore), True),
            (by_depot("at_least_once"), False),
        ):
            messages = check_found([Found(run, "tests.processors.keyed")])
            assert ("dcl_processor.E016" in {each.id for each in messages}) is is_refused
