"""Shapes whose answer may change without the row: locked first, asked in a second statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import Case, Count, Exists, OuterRef, Q, Value, When

from tests.contract.support.own_shapes import parcel
from tests.contract.support.shapes import MARIADB, POSTGRESQL, SQLITE, Shape, here
from tests.models import Depot, Message, OpenParcel, Parcel, Receipt, Scan, Seat, Truck, Vehicle


def close_depot(pk: Any, using: str) -> object:
    return Depot.objects.using(using).filter(parcels=pk).update(open=False)


def spoil_scans(pk: Any, using: str) -> object:
    return Scan.objects.using(using).filter(parcel=pk).update(ok=False)


def add_scan(pk: Any, using: str) -> object:
    return Scan.objects.using(using).create(parcel_id=pk)


def write_receipt(pk: Any, using: str) -> object:
    return Receipt.objects.using(using).create(parcel_id=pk)


def unscanned() -> Parcel:
    row: Parcel = parcel()()
    row.scans.all().delete()
    return row


def in_view() -> OpenParcel:
    row = Parcel.objects.create(depot=Depot.objects.create())
    return OpenParcel.objects.get(pk=row.pk)


def inspect_vehicle(pk: Any, using: str) -> object:
    """Flip in the parent, as a processor of vehicles does that knows nothing of trucks."""
    return Vehicle.objects.using(using).filter(pk=pk).update(inspected=True)


def span(name: str, pending: Any, make: Callable[[], Any] | None = None, **more: Any) -> Shape:
    if make is None:
        make = parcel()
        more.setdefault("spare", "note")
    return Shape(name, pending, make, **more)


parcels = Parcel.objects.filter(sent=False)
RELATIONS = [
    span("foreign key", parcels.filter(depot__open=True), leave=close_depot),
    span("reverse foreign key", parcels.filter(scans__ok=True), leave=spoil_scans),
    span("filter across", parcels, filter=Q(depot__open=True), leave=close_depot),
    span(
        "locking queryset across",
        parcels.filter(depot__open=True).select_for_update(of=("self", "depot")),
        leave=close_depot,
        vendors=(POSTGRESQL, SQLITE),
    ),
]

FLAGS_BESIDE = [
    span(
        "flag in a foreign row",
        Parcel.objects.filter(depot__open=True),
        done=None,
        finish=close_depot,
    ),
    span(
        "row that is missing", Parcel.objects.filter(receipt=None), done=None, finish=write_receipt
    ),
]

INHERITANCE = [
    span(
        "flag in the child",
        Truck.objects.filter(weighed=False),
        Truck.objects.create,
        done={"weighed": True},
        spare="plate",
        is_double=False,
    ),
    span(
        "flag in the child, and a condition on the parent",
        Truck.objects.filter(weighed=False, inspected=False),
        Truck.objects.create,
        done={"weighed": True},
        leave=inspect_vehicle,
        spare="plate",
    ),
]

scans = Scan.objects.filter(parcel=OuterRef("pk"), ok=True)
depot = Depot.objects.filter(pk=OuterRef("depot"))

SUBQUERIES = [
    span(
        "keys of two columns of the same table",
        Seat.objects.filter(pk__in=Seat.objects.filter(sent=False)),
        lambda: Seat.objects.create(row=Seat.objects.count(), number=3),
    ),
    span("exists", parcels.filter(Exists(scans)), leave=spoil_scans),
    span("not exists", parcels.filter(~Exists(scans)), unscanned, leave=add_scan),
    span("keys of the same table", Parcel.objects.filter(pk__in=parcels.values("pk"))),
    span(
        "extra where",
        parcels.extra(where=["depot_id IN (SELECT id FROM tests_depot d WHERE d.open)"]),
        leave=close_depot,
    ),
    span(
        "view",
        OpenParcel.objects.filter(sent=False),
        in_view,
        leave=close_depot,
        vendors=(POSTGRESQL, MARIADB),
    ),
]

ANNOTATIONS = [
    span(
        "count of none",
        Parcel.objects.annotate(n=Count("scans")).filter(n=0),
        unscanned,
        done=None,
        finish=add_scan,
        is_double=False,
    ),
    span(
        "case",
        parcels.filter(
            Case(When(depot__open=True, then=Value(value=True)), default=Value(value=False))
        ),
        leave=close_depot,
    ),
    span("distinct", parcels.filter(scans__ok=True).distinct(), leave=spoil_scans, is_double=False),
    span(
        "document",
        Message.objects.filter(data__state="new"),
        lambda: Message.objects.create(data={"state": "new"}),
        done={"data": {"state": "done"}},
        is_double=False,
    ),
]

SPANNING = here([*RELATIONS, *FLAGS_BESIDE, *INHERITANCE, *SUBQUERIES, *ANNOTATIONS])
