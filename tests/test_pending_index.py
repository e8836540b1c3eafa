"""Which index is suggested for a question, and its code."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from django.db.models import Exists, F, Index, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Lower, Now
from django.utils import timezone

from dcl_processor.insights import pending_index
from dcl_processor.pending.question import Question, ask
from tests.models import Colour, Depot, Errand, Parcel, Priced, Sample, Seat, Visit

pytestmark = pytest.mark.django_db

NOW = timezone.now()


def question(rows: QuerySet[Any]) -> Question[Any]:
    return ask(rows, label="test")


def suggested(rows: QuerySet[Any], **options: Any) -> Index | None:
    return pending_index.pending_index(question(rows), **options)


@pytest.mark.parametrize(
    ("asked", "condition"),
    [
        (Q(sent_at=None), Q(sent_at__isnull=True)),
        (Q(weight__range=(9, 10)), Q(weight__range=[9, 10])),
        *(
            (asked, asked)
            for asked in (
                Q(sent=False, weight__gt=5),
                Q(priority__in=[2, 1]),
                Q(sent=False) | Q(tries=0),
                Q(tries=0) & (Q(sent=False) | Q(weight=5)),
                ~Q(sent=True, tries=0),
                ~(Q(sent=True) | Q(tries=0)),
                Q(tries__lt=F("priority")),
                Q(note__startswith="a"),
            )
        ),
    ],
    ids=str,
)
def test_the_condition_says_what_the_question_does(asked: Q, condition: Q) -> None:
    index = suggested(Parcel.objects.filter(asked))
    assert index is not None
    assert index.condition == condition


@pytest.mark.parametrize(
    "left_out",
    [
        Q(depot__open=True),
        Q(depot__in=Depot.objects.filter(open=True)),
        Q(Exists(Depot.objects.filter(pk=OuterRef("depot")))),
        Q(sent_at__lte=Now()) | Q(tries=0),
        Q(sent_at__date=NOW.date()),
        ~Q(depot__open=True),
        Q(sent=False) ^ Q(tries=0),
    ],
)
def test_what_no_index_can_hold_is_left_out(left_out: Q) -> None:
    """A weaker condition still follows from the question."""
    asked = question(Parcel.objects.filter(left_out, sent=False))
    index = pending_index.pending_index(asked)
    assert index is not None
    assert (index.fields, index.condition) == (["id"], Q(sent=False))


def test_a_column_that_is_compared_with_the_time_is_the_first_of_the_index() -> None:
    yesterday = NOW - timedelta(days=1)
    for at in (NOW, Now(), Now() - timedelta(days=1), Value(yesterday)):
        index = suggested(Parcel.objects.filter(sent=False, sent_at__lte=at))
        assert index is not None
        assert (index.fields, index.condition) == (["sent_at", "id"], Q(sent=False))
    index = suggested(Parcel.objects.filter(sent_at__range=(yesterday, NOW)))
    assert index is not None
    assert (index.fields, index.condition) == (["sent_at", "id"], None)


def test_the_filter_of_a_run_and_the_conditions_of_due_are_no_part_of_it() -> None:
    asked = ask(
        Errand.objects.filter(done=False),
        label="test",
        filter=Q(place=7),
        due=lambda model: Q(attempts__lt=5) & (Q(leased_until=None) | Q(leased_until__lte=Now())),
    )
    index = pending_index.pending_index(asked)
    assert index is not None
    assert (index.fields, index.condition) == (["id"], Q(done=False))


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        (
            Parcel.objects.filter(sent=False).order_by("-priority", "note"),
            ["-priority", "note", "id"],
        ),
        (Parcel.objects.filter(sent=False).order_by("-pk"), ["-id"]),
        (Parcel.objects.filter(sent=False).order_by("tries", "depot__name"), ["tries", "id"]),
        (Parcel.objects.filter(sent=False).order_by(Lower("note")), ["id"]),
        (Priced.objects.filter(sent=False), ["id"]),
        (Visit.objects.filter(done=False), ["id"]),
        (Seat.objects.filter(sent=False).order_by("number"), ["number", "row"]),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_with_an_order_its_columns_come_first(rows: QuerySet[Any], fields: list[str]) -> None:
    index = suggested(rows)
    assert index is not None
    assert index.fields == fields


def test_the_code_makes_the_index() -> None:
    """Pasted with its imports, it is the same index, whatever types its values have."""
    rows = Sample.objects.filter(
        Q(price__gt=Decimal("1.50")) | Q(span=timedelta(hours=1)),
        ~Q(colour__in={Colour.RED, Colour.BLUE}),
        token=UUID(int=7),
        ratio__lt=F("price"),
    )
    index = suggested(rows)
    assert index is not None
    names: dict[str, Any] = {}
    exec("\n".join(pending_index.imports(index)), names)  # noqa: S102  # what users paste
    made = eval(pending_index.source(index), names)  # noqa: S307  # likewise
    assert made.deconstruct() == index.deconstruct()
    assert made.name == index.name


def test_the_name_is_short_and_that_of_one_index() -> None:
    names = [
        each.name
        for each in (
            suggested(Parcel.objects.filter(sent=False)),
            suggested(Parcel.objects.filter(sent=True)),
            suggested(Parcel.objects.filter(sent=False).order_by("note")),
            suggested(Errand.objects.filter(done=False)),
        )
        if each is not None
    ]
    assert len({*names}) == 4
    assert all(re.fullmatch(r"(parcel|errand)_pending_[0-9a-f]{6}", name) for name in names)
    again = suggested(Parcel.objects.filter(sent=False))
    assert again is not None
    assert again.name == names[0]


def test_an_index_of_the_meta_is_known_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    index = suggested(Parcel.objects.filter(sent=False, sent_at__isnull=False))
    assert index is not None
    assert not pending_index.is_declared(index, Parcel)
    own = Index(fields=["id"], name="own", condition=Q(sent=False, sent_at__isnull=False))
    monkeypatch.setattr(Parcel._meta, "indexes", [own])
    assert pending_index.is_declared(index, Parcel)
    monkeypatch.setattr(Parcel._meta, "indexes", [Index(fields=["id"], name="own")])
    assert not pending_index.is_declared(index, Parcel)
