"""Spanning shapes whose SQL is not seen in the join: subqueries, functions, annotations."""

from __future__ import annotations

from django.db.models import BooleanField, Case, Count, Exists, Func, OuterRef, Value, When, Window
from django.db.models.expressions import RawSQL
from django.db.models.functions import RowNumber

from tests.contract.support.changes import (
    add_scan,
    close_depot,
    in_view,
    remove_scan,
    spoil_scans,
    unscanned,
)
from tests.contract.support.shapes import MARIADB, POSTGRESQL, SQLITE, here
from tests.contract.support.spanning_shapes import span
from tests.models import Depot, Message, OpenParcel, Parcel, Scan, Seat


class IsOpen(Func):
    """A STABLE function that reads another table."""

    function = "tests_is_open"
    output_field = BooleanField()


parcels = Parcel.objects.filter(sent=False)
scans = Scan.objects.filter(parcel=OuterRef("pk"), ok=True)
depot = Depot.objects.filter(pk=OuterRef("depot"))

SUBQUERIES = [
    span(
        "keys of two columns of the same table",
        Seat.objects.filter(pk__in=Seat.objects.filter(sent=False)),
        lambda: Seat.objects.create(row=Seat.objects.count(), number=3),
    ),
    span(
        "keys of a window",
        Parcel.objects.filter(
            pk__in=parcels.annotate(place=Window(RowNumber(), order_by="-priority"))
            .filter(place__lte=50)
            .values("pk")
        ),
    ),
    span(
        "raw keys",
        Parcel.objects.filter(pk__in=RawSQL("SELECT id FROM tests_parcel p WHERE NOT p.sent", [])),
    ),  # no input
    span("exists", parcels.filter(Exists(scans)), leave=spoil_scans),
    span("not exists", parcels.filter(~Exists(scans)), unscanned, leave=add_scan),
    span("keys of the same table", Parcel.objects.filter(pk__in=parcels.values("pk"))),
    span(
        "keys of a slice",
        Parcel.objects.filter(pk__in=parcels.order_by("-priority").values("pk")[:50]),
        vendors=(POSTGRESQL, SQLITE),
    ),
    span(
        "extra where",
        parcels.extra(where=["depot_id IN (SELECT id FROM tests_depot d WHERE d.open)"]),
        leave=close_depot,
    ),
    span(
        "stable function",
        parcels.filter(IsOpen("depot_id")),
        leave=close_depot,
        vendors=(POSTGRESQL, MARIADB),
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
        "count",
        parcels.annotate(n=Count("scans")).filter(n__gte=2),
        leave=remove_scan,
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
        "distinct and ordered across",
        parcels.filter(scans__ok=True).distinct().order_by("scans__ok", "depot__name"),
        leave=spoil_scans,
        is_double=False,
    ),
    span(
        "ordered by an annotation",
        parcels.annotate(n=Count("scans")).order_by("-n"),
        is_double=False,
    ),
    span(
        "document",
        Message.objects.filter(data__state="new"),
        lambda: Message.objects.create(data={"state": "new"}),
        done={"data": {"state": "done"}},
        is_double=False,
    ),
]

EXPRESSIONS = here([*SUBQUERIES, *ANNOTATIONS])
