"""What kind of question a queryset is, and which ones cannot be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import models
from django.db.models import (
    Case,
    Count,
    Exists,
    F,
    FilteredRelation,
    Lookup,
    Max,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Transform,
    Value,
    When,
    Window,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now, Rank, RowNumber, TruncYear, Upper
from django.db.models.lookups import Exact
from django.test.utils import override_settings, register_lookup

from dcl_processor.exceptions import InvalidPending
from dcl_processor.pending.question import ask, is_own_table
from tests.models import (
    Depot,
    Message,
    OpenParcel,
    Parcel,
    Priced,
    QuietParcel,
    Scan,
    Seat,
    Truck,
    Vehicle,
)

parcels = Parcel.objects.filter(sent=False)
open_depots = Depot.objects.filter(open=True)


@pytest.mark.parametrize(
    "queryset",
    [
        parcels,
        Parcel.objects.filter(sent__exact=False, priority__in={1, 2}, weight__range=(1, 2)),
        Parcel.objects.filter(~(Q(sent=True) | Q(weight=1) ^ Q(note__iregex="^x"))),
        Parcel.objects.filter(weight__lt=F("priority")),
        Parcel.objects.filter(sent_at__lt=Now(), note=Value("x")),
        Parcel.objects.filter(Exact(F("sent"), Value(value=False))),
        Parcel.objects.filter(depot=3, depot_id__in=[1], depot__id=3, depot__isnull=False),
        parcels.only("note").order_by("depot__name").select_for_update(),
        QuietParcel.objects.filter(sent=False),
        Seat.objects.filter(sent=False, row__lt=F("number")),
        Vehicle.objects.filter(inspected=False),
        Priced.objects.filter(gross__gt=3),
    ],
    ids=lambda queryset: f"{queryset.query.where}"[:70],
)
def test_questions_of_the_rows_own_columns(queryset: QuerySet[Any]) -> None:
    assert is_own_table(queryset) is True


@pytest.mark.parametrize(
    "queryset",
    [
        parcels.filter(depot__open=True),
        parcels.filter(depot__name=F("note")),
        parcels.filter(priority__in=[F("tries"), 4]),
        parcels.filter(scans__ok=True),
        parcels.filter(receipt__isnull=True),
        parcels.filter(depot__in=open_depots),
        parcels.filter(weight__in=[Subquery(open_depots.values("pk")[:1])]),
        parcels.filter(weight__range=(1, Subquery(open_depots.values("pk")[:1]))),
        parcels.filter(pk__in=parcels),
        parcels.filter(Exists(open_depots.filter(pk=OuterRef("depot")))),
        parcels.filter(RawSQL("sent", [], output_field=models.BooleanField())),
        parcels.filter(weight__gt=F("priority") + 1),
        parcels.filter(Case(When(sent=True, then=Value(value=True)), default=Value(value=False))),
        parcels.filter(sent_at__year=2000),
        parcels.filter(sent_at=TruncYear("sent_at")),
        parcels.extra(where=["sent"]),
        parcels.extra(select={"x": "1"}),
        parcels.extra(tables=["tests_depot"]),
        parcels.annotate(n=Count("scans")),
        parcels.alias(n=Value(3)).filter(n=3),
        parcels.alias(good=FilteredRelation("scans", condition=Q(scans__ok=True))).filter(
            good=None
        ),
        parcels.distinct(),
        parcels.select_related("depot"),
        parcels.none(),
        Message.objects.filter(data__state="new"),
        Truck.objects.filter(weighed=False),
        OpenParcel.objects.filter(sent=False),
    ],
    ids=lambda queryset: f"{queryset.query.where}"[:70],
)
def test_everything_else_spans(queryset: QuerySet[Any]) -> None:
    assert is_own_table(queryset) is False


class LooksElsewhere(Lookup):
    """A project's own lookup may compile to any SQL at all."""

    lookup_name = "elsewhere"

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[()]]:
        return "EXISTS (SELECT 1 FROM tests_depot WHERE open)", ()


class LooksElsewhereExactly(LooksElsewhere):
    lookup_name = "exact"


class Elsewhere(Transform):
    lookup_name = "far"
    function = "tests_is_open"


def test_lookups_and_transforms_that_a_project_registered_span() -> None:
    with register_lookup(models.IntegerField, LooksElsewhere, Elsewhere):
        assert not is_own_table(Parcel.objects.filter(weight__elsewhere=1))
        assert not is_own_table(Parcel.objects.filter(weight__far=1))
    with register_lookup(models.CharField, LooksElsewhereExactly):
        assert not is_own_table(Parcel.objects.filter(note="x"))
    with register_lookup(models.CharField, Upper):
        assert not is_own_table(Parcel.objects.filter(note__upper="X"))
    assert is_own_table(Parcel.objects.filter(note="x"))


ranked = Parcel.objects.annotate(rank=Window(Rank(), order_by="-priority"))
NOT_TO_BE_ASKED: list[tuple[Callable[[], Any], str]] = [
    (lambda: parcels[:5], r"a slice; pass limit="),
    (lambda: parcels.union(parcels), r"a union\(\); write it as one filter with Q"),
    (parcels.values, r"values\(\); remove that call"),
    (
        lambda: parcels.values_list("pk", flat=True),
        r"values_list\(\) or dates\(\); remove that call",
    ),
    (
        lambda: Parcel.objects.raw("SELECT * FROM tests_parcel"),
        r".*of type RawQuerySet; return Model.obj",
    ),
    (lambda: ranked.filter(rank=1), r"a window expression, .* use a subquery"),
    (
        lambda: parcels.annotate(n=Window(Max("weight")) + 1),
        r"a window expression, .* use a subquery",
    ),
    (lambda: list(Parcel.objects.none()), r"\[\], of type list; return Model.objects.filter"),
    (lambda: None, r"None, of type NoneType; return Model.objects.filter"),
]


@pytest.mark.parametrize(
    ("source", "words"), NOT_TO_BE_ASKED, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.django_db
def test_refused_when_it_is_returned(source: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidPending, match=rf"^test: expected pending to be .* got {words}"):
        ask(source, label="test")


@pytest.mark.django_db
def test_columns_that_are_distinct_are_refused_by_name() -> None:
    with pytest.raises(InvalidPending, match=r"got distinct\(\) on columns, .* use a subquery"):
        ask(parcels.distinct("depot"), label="test")


@pytest.mark.django_db
def test_a_window_behind_a_subquery_is_asked() -> None:
    first = ranked.filter(rank__lte=3).values("pk")
    assert not ask(parcels.filter(pk__in=first), label="test").own_table
    assert not ask(parcels.filter(pk__in=Subquery(first)), label="test").own_table


class OfTheInstance:
    """A router by shards: a related row lives where its own row does."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if getattr(hints.get("instance"), "name", "") == "far" else None


@override_settings(DATABASE_ROUTERS=["tests.test_question.OfTheInstance"])
def test_a_related_managers_queryset_is_locked_where_its_instance_lives() -> None:
    far, near = Depot(pk=1, name="far"), Depot(pk=2, name="near")
    assert ask(far.parcels.filter(sent=False), label="test").using == "other"
    assert ask(near.parcels.filter(sent=False), label="test").using == "default"
    near._state.db = "other"
    assert ask(near.parcels.all(), label="test").using == "other"
    assert ask(near.parcels.all(), label="test", using="default").using == "default"
    assert ask(parcels.using("other"), label="test").using == "other"


@pytest.mark.django_db
def test_a_row_outside_the_runs_filter_is_pending_all_the_same() -> None:
    """Or else a flip that only leaves the filter would pass for one that finishes the row."""
    row = Parcel.objects.create(note="x")
    asked = ask(parcels, label="test", filter=Q(note=""))
    assert not asked.among([row.pk]).exists()
    assert asked.still_pending([row.pk]).exists()
    Parcel.objects.update(sent=True)
    assert not asked.still_pending([row.pk]).exists()


@pytest.mark.django_db
def test_a_filter_is_refused_like_a_queryset() -> None:
    with pytest.raises(InvalidPending, match=r"a window expression"):
        ask(parcels, label="test", filter=Q(Exact(Window(RowNumber()), 1)))


@pytest.mark.django_db
def test_the_users_queryset_is_not_changed() -> None:
    source = parcels.select_for_update().order_by("-priority")
    before = str(source.query)
    asked = ask(source, label="test", filter=Q(depot__open=True))
    assert not asked.queryset.query.select_for_update
    assert source.query.select_for_update
    assert str(source.query) == before
    assert Scan.objects.count() == 0
