"""Stage 2: what is locked, what is read under the lock, and what is not done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction
from django.db.models import F, Model, QuerySet
from django.db.models.signals import post_init

from dcl_processor.engine.claim import claim
from dcl_processor.engine.settlement import Wanted
from dcl_processor.exceptions import InvalidPending
from dcl_processor.pending.question import ask
from dcl_processor.sql.messages import Session
from tests.models import Depot, Parcel, RoadTrain, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@contextmanager
def locked(queryset: QuerySet[Any], pk: Any) -> Iterator[Any]:
    """Claim a row for the block, and yield it, or why it was missed."""
    question = ask(queryset, label="test")
    session = Session(question.using, "test")
    try:
        got = claim(session, question, Wanted([pk]))
        found: list[Any] = [*got.rows, *[why.name.lower() for why in got.missed.values()]]
        [held] = found
        yield held
    finally:
        session.rollback()


def claimed(queryset: QuerySet[Any], pk: Any) -> Any:
    """Return the row, or why it was missed."""
    with locked(queryset, pk) as held:
        return held if isinstance(held, str) else held.row


@pytest.mark.parametrize("rows", [{"sent": False}, {"depot__open": True}])
def test_a_row_that_is_joined_stays_free_for_others(rows: dict[str, Any]) -> None:
    depot = Depot.objects.create()
    row = Parcel.objects.create(depot=depot)
    asked = Parcel.objects.filter(**rows).select_related("depot")
    with locked(asked, row.pk) as held:
        assert held.row == row
        with transaction.atomic(using="other"):
            others = Depot.objects.using("other")
            assert list(others.select_for_update(skip_locked=True)) == [depot]
            others.update(name="written meanwhile")


def test_one_instance_is_made_and_it_is_the_handlers() -> None:
    """A model's own code, and that of its signals, runs for the row that is handed out alone."""
    row = Parcel.objects.create(depot=Depot.objects.create())
    truck = RoadTrain.objects.create()
    made: list[Model] = []

    def note(instance: Model, **kwargs: Any) -> None:
        made.append(instance)

    for queryset, pk in (
        (Parcel.objects.filter(sent=False), row.pk),
        (Parcel.objects.filter(sent=False, depot__open=True), row.pk),
        (RoadTrain.objects.filter(inspected=False), truck.pk),
    ):
        post_init.connect(note)
        try:
            assert claimed(queryset, pk) is made[0]
        finally:
            post_init.disconnect(note)
        assert [type(instance) for instance in made] == [queryset.model]
        made.clear()


def test_a_question_with_several_answers_for_one_row_is_refused() -> None:
    row = Parcel.objects.create()
    asked = Parcel.objects.annotate(scan=F("scans__ok")).filter(sent=False)
    for ok in (True, True):
        Scan.objects.create(parcel=row, ok=ok)
        assert claimed(asked, row.pk).scan is True
    Scan.objects.create(parcel=row, ok=False)
    words = rf"Parcel: expected .* got row {row.pk} several times with different values of 'scan'"
    with pytest.raises(InvalidPending, match=words):
        claimed(asked, row.pk)
