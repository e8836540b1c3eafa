"""The row of a reservation that was made from a token: that of ``reserve()``, as far as it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Value
from django.test.utils import CaptureQueriesContext

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.contrib.reservations import Reservation
from dcl_processor.exceptions import ReservationLost
from tests.models import Depot, Express, Parcel, QuietParcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CLAIM = {"claim": {"note": "out"}, "claimed_at": "sent_at", "reset": {"note": ""}}
LEASE = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
FREE = Q(note="")

each_kind = pytest.mark.parametrize(
    ("options", "free"),
    [
        (LEASE, FREE),
        ({**LEASE, **CLAIM}, FREE | Q(note="out", leased_until__isnull=False)),
        ({"delivery": Delivery.AT_MOST_ONCE, **CLAIM}, FREE),
    ],
    ids=["lease", "mark", "claim"],
)
#: With a claim alone, which takes its row out of pending.
CLAIMED = {"delivery": Delivery.AT_MOST_ONCE, **CLAIM}


def handed_out(
    pending: Callable[[], QuerySet[Any]], options: dict[str, Any], **more: Any
) -> tuple[Reservation[Any], Reservation[Any]]:
    """Reserve a row; return its reservation, and the one that its token makes."""

    def process(row: Any) -> None:
        raise AssertionError("the handler is elsewhere")

    done = {"done": {"sent": True}, "name": "tests.handed_out"}
    run: BatchProcessor[Any] = batch_processor(pending=pending, **{**done, **options, **more})(
        process
    )
    [handed] = run.reserve()
    return handed, run.reservation(handed.token)


def parcel(**columns: Any) -> Parcel:
    return Parcel.objects.create(depot=Depot.objects.create(name="Hamburg"), **columns)


@each_kind
def test_it_has_the_annotations_the_class_and_the_related_rows(
    options: dict[str, Any], free: Q
) -> None:
    parcel(priority=21)

    def pending() -> QuerySet[Any]:
        rows = QuietParcel.objects.filter(free, sent=False).select_related("depot").defer("code")
        return rows.annotate(double=F("priority") * 2, place=F("depot__name"))

    handed, again = handed_out(pending, options)
    with CaptureQueriesContext(connection) as queries:
        row = again.row
        assert row.depot.name == "Hamburg"
    assert len(queries) == 1
    assert (row.double, row.place) == (handed.row.double, handed.row.place) == (42, "Hamburg")
    assert [type(each.row) for each in (handed, again)] == [QuietParcel] * 2
    assert row.get_deferred_fields() == handed.row.get_deferred_fields()
    assert row.note == handed.row.note
    again.settle()
    assert Parcel.objects.get().sent


CONDITIONS: dict[str, Callable[[], Q]] = {
    "or": lambda: Q(note="") | Q(weight__gt=5),
    "not": lambda: ~Q(note="out"),
    "time": lambda: Q(sent_at=None, note=""),
    "subquery": lambda: Q(Exists(Scan.objects.filter(parcel=OuterRef("pk"), ok=True)), note=""),
    "of the outer row": lambda: Q(Exists(Depot.objects.exclude(name=OuterRef("note"))), note=""),
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS.keys())
def test_the_conditions_that_the_claim_has_ended_do_not_hide_the_row(
    condition: Callable[[], Q],
) -> None:
    row = parcel()
    for ok in (True, True, False):
        Scan.objects.create(parcel=row, ok=ok)

    def pending() -> QuerySet[Any]:
        good = Parcel.objects.filter(condition(), scans__ok=True)
        return good.annotate(scanned=Count("scans"))

    handed, again = handed_out(pending, CLAIMED)
    # Of the scans that the other condition selects.
    assert handed.row.scanned == again.row.scanned == 2


@pytest.mark.parametrize(
    "pending",
    [
        lambda: Parcel.objects.extra(where=["note = ''"]),  # a constant
        lambda: Parcel.objects.filter(note="", priority=0),
        lambda: Parcel.objects.filter(note="") | Parcel.objects.filter(weight__gt=5),
    ],
    ids=["raw", "another column that changed", "combined"],
)
def test_a_row_that_another_condition_hides_has_its_annotations_too(
    pending: Callable[[], QuerySet[Any]],
) -> None:
    parcel()
    _, again = handed_out(lambda: pending().annotate(place=F("depot__name")), CLAIMED)
    Parcel.objects.update(priority=1)
    assert again.row.place == "Hamburg"


@pytest.mark.parametrize(
    ("counts", "hidden"),
    [(True, True), (False, True), (False, False)],
    ids=["aggregate", "join", "join of two"],
)
def test_a_row_whose_annotations_are_not_certain_has_none(counts: bool, hidden: bool) -> None:
    """With the condition the aggregate would count other rows, and the join return two."""
    row = parcel()
    Scan.objects.create(parcel=row)

    def pending() -> QuerySet[Any]:
        named = QuietParcel.objects.filter(scans__ok=True, note="")
        first = named.annotate(scan=Count("scans") if counts else F("scans__pk"))
        return first.extra(where=["tries = 0"])  # a constant

    handed, again = handed_out(pending, CLAIMED)
    Scan.objects.create(parcel=row)
    Parcel.objects.update(tries=int(hidden))
    assert [type(each.row) for each in (handed, again)] == [QuietParcel] * 2
    assert hasattr(handed.row, "scan")
    assert not hasattr(again.row, "scan")


def test_conditions_on_other_rows_of_the_same_table_stay() -> None:
    """The relation leads back to the table of the claim's column, under another alias."""
    made = parcel()
    sibling = Parcel.objects.create(depot=made.depot, note="sibling")

    def pending() -> QuerySet[Any]:
        beside = Parcel.objects.filter(note="", depot__parcels__note="sibling")
        return beside.annotate(sibling=F("depot__parcels__pk"))

    handed, again = handed_out(pending, CLAIMED)
    assert handed.row.sibling == again.row.sibling == sibling.pk


def test_a_row_that_no_longer_has_the_joined_row_gets_no_other_one() -> None:
    row = parcel()
    scan = Scan.objects.create(parcel=row)

    def pending() -> QuerySet[Any]:
        return Parcel.objects.filter(note="", scans__ok=True).annotate(scan=F("scans__pk"))

    handed, again = handed_out(pending, CLAIMED)
    assert handed.row.scan == scan.pk
    scan.delete()
    Scan.objects.create(parcel=row, ok=False)
    assert again.row == row
    assert not hasattr(again.row, "scan")


def test_a_claim_in_the_table_of_a_parent_does_not_hide_the_row() -> None:
    Express.objects.create(result="new")
    options = {"claim": {"claimed": True}, "claimed_at": "claimed_at", "reset": {"claimed": False}}
    handed, again = handed_out(
        lambda: Express.objects.filter(claimed=False, done=False).annotate(shown=Count("result")),
        {"delivery": Delivery.AT_MOST_ONCE, **options, "done": {"done": True, "claimed": False}},
    )
    assert handed.row.shown == again.row.shown == 1


@each_kind
def test_a_row_that_was_deleted_is_lost(options: dict[str, Any], free: Q) -> None:
    parcel()
    _, again = handed_out(lambda: Parcel.objects.filter(free, sent=False), options)
    Parcel.objects.all().delete()
    with pytest.raises(ReservationLost) as lost:
        assert again.row
    assert lost.value.reason == "gone"


def test_a_row_whose_annotation_fails_without_the_conditions_is_read_without_it() -> None:
    """Another session has changed the column that a condition keeps from being divided by."""
    made = parcel(priority=4)

    def rate() -> QuerySet[Parcel]:
        return Parcel.objects.filter(FREE, sent=False, priority__gt=0).annotate(
            rate=Value(100) / F("priority")
        )

    _, again = handed_out(rate, LEASE)
    Parcel.objects.filter(pk=made.pk).update(priority=0)
    assert again.row == made
    again.settle()
    made.refresh_from_db()
    assert made.sent
