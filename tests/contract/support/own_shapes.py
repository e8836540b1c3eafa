"""Shapes that ask the row's own columns alone: lock and second check may be one statement."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from tests.contract.support.shapes import Shape, here
from tests.models import (
    Badge,
    Crate,
    Depot,
    Letter,
    Parcel,
    Priced,
    QuietParcel,
    Scan,
    Seat,
    Vehicle,
    Voucher,
    Watched,
)


def parcel(**values: Any) -> Callable[[], Parcel]:
    """Make parcels with a depot of their own, a weight, and two scans."""

    def make() -> Parcel:
        depot = Depot.objects.create(name="north")
        given = {name: value() if callable(value) else value for name, value in values.items()}
        row: Parcel = Parcel.objects.create(**{"depot": depot, "weight": 5, **given})
        Scan.objects.create(parcel=row)
        Scan.objects.create(parcel=row)
        return row

    return make


def own(name: str, pending: Any, make: Callable[[], Any] | None = None, **more: Any) -> Shape:
    more = {"is_double": False, **more}
    if make is None:
        make = parcel()
        more.setdefault("spare", "note")
    return Shape(name, pending, make, **more)


def overdue() -> Any:
    return timezone.now() - timedelta(minutes=1)


parcels = Parcel.objects.filter(sent=False)
due = parcel(sent_at=overdue)
clear_date = {"sent_at": None}

LOOKUPS = [
    own("equal", parcels),
    own("null", Parcel.objects.filter(sent_at=None), done={"sent_at": Now()}),
    own(
        "less than another column",
        Parcel.objects.filter(tries__lt=F("priority")),
        parcel(priority=3),
        done={"tries": F("priority")},
        spare="note",
    ),
    own(
        "the database's clock",
        Parcel.objects.filter(sent_at__lte=Now()),
        due,
        done=clear_date,
        spare="note",
    ),
    own("generated column", Priced.objects.filter(sent=False, gross__gte=2), Priced.objects.create),
]

KEYS = [
    own("uuid key", Letter.objects.filter(sent=False), Letter.objects.create),
    own(
        "key of letters",
        Voucher.objects.filter(sent=False),
        lambda: Voucher.objects.create(code=f"v{Voucher.objects.count()}"),
    ),
    own(
        "key of two columns",
        Seat.objects.filter(sent=False),
        lambda: Seat.objects.create(row=Seat.objects.count(), number=3),
    ),
    own(
        "key of another row",
        Badge.objects.filter(printed=False),
        lambda: Badge.objects.create(parcel=parcel()()),
        done={"printed": True},
        spare="size",
    ),
]

MODELS = [
    own("proxy", QuietParcel.objects.filter(sent=False)),
    own("manager that hides rows", Crate.visible.filter(sent=False), Crate.visible.create),
    own(
        "parent of multi-table inheritance",
        Vehicle.objects.filter(inspected=False),
        Vehicle.objects.create,
        done={"inspected": True},
        spare="plate",
    ),
    own(
        "model that looks at itself",
        Watched.objects.filter(state="new"),
        Watched.objects.create,
        done={"state": "done"},
        spare="note",
    ),
]

LOADING = [
    own("locking queryset", parcels.select_for_update(nowait=True)),
    own("using", Parcel.objects.using("other").filter(sent=False), using="other"),
    own("filter", parcels, filter=Q(weight=5)),
    own(
        "related manager",
        lambda: Depot.objects.get(name="home").parcels.filter(sent=False),
        parcel(depot=lambda: Depot.objects.get_or_create(name="home")[0]),
        spare="note",
    ),
]

ORDERS = [
    own("order across a relation", parcels.order_by("depot__name", "-scans__id")),
    own("random order", parcels.order_by("?")),
]

OWN = here([*LOOKUPS, *KEYS, *MODELS, *LOADING, *ORDERS])
