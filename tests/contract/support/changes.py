"""Rows of several tables, and the changes by which they leave a question."""

from __future__ import annotations

from typing import Any

from tests.contract.support.own_shapes import parcel
from tests.models import Depot, OpenParcel, Parcel, Receipt, Scan, Tag, Vehicle


def close_depot(pk: Any, using: str) -> object:
    return Depot.objects.using(using).filter(parcels=pk).update(open=False)


def spoil_scans(pk: Any, using: str) -> object:
    return Scan.objects.using(using).filter(parcel=pk).update(ok=False)


def remove_scan(pk: Any, using: str) -> object:
    return Scan.objects.using(using).filter(parcel=pk).latest("pk").delete()


def add_scan(pk: Any, using: str) -> object:
    return Scan.objects.using(using).create(parcel_id=pk)


def remove_tags(pk: Any, using: str) -> object:
    return Parcel.tags.through.objects.using(using).filter(parcel=pk).delete()


def write_receipt(pk: Any, using: str) -> object:
    return Receipt.objects.using(using).create(parcel_id=pk)


def tagged() -> Parcel:
    row: Parcel = parcel()()
    row.tags.add(Tag.objects.create(name="red"), Tag.objects.create(name="red"))
    return row


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
