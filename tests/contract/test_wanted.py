"""What a claim that may choose must not cost, on databases where it may and where it may not."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import isolate_apps

from dcl_processor import batch_processor
from tests.contract.support.parcels import UNSENT, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.wanted import refuse_to_load
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("own_table", [True, False])
def test_a_row_that_cannot_be_loaded_costs_the_others_nothing(
    own_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = parcels(5)
    refuse_to_load(rows[1], monkeypatch)
    calls: list[int] = []
    asked = UNSENT if own_table else UNSENT.filter(pk__in=UNSENT.values("pk"))
    run = batch_processor(pending=asked, done={"sent": True})(lambda row: calls.append(row.pk))
    report = run()
    assert calls == [row.pk for row in rows if row != rows[1]]
    assert_run(report, processed=4, failed=1)


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("strict_order", [False, True])
def test_a_row_that_somebody_moves_to_the_front_takes_no_others_place(strict_order: bool) -> None:
    rows = parcels(10)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        if len(calls) == 1 and connection.features.has_select_for_update:
            Parcel.objects.using("other").filter(pk=rows[7].pk).update(priority=-1)

    asked = UNSENT.order_by("priority")
    run = batch_processor(pending=asked, done={"sent": True}, strict_order=strict_order)(handle)
    report = run(wait_for_locked=0)
    assert calls == [row.pk for row in rows]
    assert_run(report, processed=10, passes=1)


@pytest.mark.usefixtures("choosing")
def test_a_question_that_was_reversed_is_chosen_from_in_its_order() -> None:
    rows = parcels(6)
    calls: list[int] = []
    asked = UNSENT.order_by("-priority").reverse()
    run = batch_processor(pending=asked, done={"sent": True})(lambda row: calls.append(row.pk))
    report = run(wait_for_locked=0)
    assert calls == [row.pk for row in rows]
    assert_run(report, processed=6, passes=1)


class Backwards(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Keeps its text backwards: the database has another order than Python."""

    def get_prep_value(self, value: Any) -> Any:
        return value and value[::-1]

    def from_db_value(self, value: str | None, *_: Any) -> str | None:
        return value and value[::-1]


@pytest.mark.usefixtures("choosing")
@isolate_apps("tests")
def test_keys_that_the_database_puts_in_another_order_are_chosen_by_their_place() -> None:
    class Word(models.Model):
        text = Backwards(max_length=20, primary_key=True)
        place = models.IntegerField()
        sent = models.BooleanField(default=False)

        class Meta:
            app_label = "tests"

    words = ["ad", "bc", "cb", "da"]
    calls: list[str] = []
    asked = Word._default_manager.filter(sent=False).order_by("place")
    run = batch_processor(pending=asked, done={"sent": True})(lambda row: calls.append(row.pk))
    with connection.schema_editor() as editor:
        editor.create_model(Word)
    try:
        for place, text in enumerate(words):
            Word._default_manager.create(text=text, place=place)
        report = run(wait_for_locked=0)
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(Word)
    assert calls == words
    assert_run(report, processed=4, passes=1)
