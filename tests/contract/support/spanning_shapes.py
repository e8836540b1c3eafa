"""Shapes whose answer may change without the row: locked first, asked in a second statement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import FilteredRelation, Q

from tests.contract.support.changes import (
    close_depot,
    inspect_vehicle,
    remove_tags,
    spoil_scans,
    tagged,
    write_receipt,
)
from tests.contract.support.own_shapes import parcel
from tests.contract.support.shapes import POSTGRESQL, SQLITE, Shape, here
from tests.models import Parcel, Truck


def span(name: str, pending: Any, make: Callable[[], Any] | None = None, **more: Any) -> Shape:
    if make is None:
        make = parcel()
        more.setdefault("spare", "note")
    return Shape(name, pending, make, **more)


parcels = Parcel.objects.filter(sent=False)
RELATIONS = [
    span("foreign key", parcels.filter(depot__open=True), leave=close_depot),
    span("reverse foreign key", parcels.filter(scans__ok=True), leave=spoil_scans),
    span("many to many", parcels.filter(tags__name="red"), tagged, leave=remove_tags),
    span(
        "filtered relation",
        parcels.alias(good=FilteredRelation("scans", condition=Q(scans__ok=True))).filter(
            good__isnull=False
        ),
        leave=spoil_scans,
    ),
    span("filter across", parcels, filter=Q(depot__open=True), leave=close_depot),
    span(
        "locking queryset across",
        parcels.filter(depot__open=True).select_for_update(of=("self", "depot")),
        leave=close_depot,
        vendors=(POSTGRESQL, SQLITE),
    ),
    span(
        "ordered across", parcels.filter(scans__ok=True).order_by("-scans__id"), leave=spoil_scans
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

SPANNING = here([*RELATIONS, *FLAGS_BESIDE, *INHERITANCE])
