"""What a batch's flips write, and to which rows."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.db.models import F, Q
from django.db.models.signals import post_save
from django.utils import timezone

from dcl_processor.exceptions import StillPending
from tests.contract.support import errands as the
from tests.contract.support.parcels import flips, in_batches, note, parcels, sent, statements
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import at_update, temporary
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


if connection.vendor != "mysql":  # whose triggers cannot drop an update

    def drop_the_flip_of_place_1() -> Any:
        if connection.vendor == "postgresql":
            return at_update("OLD.priority = 1", "RETURN NULL", table="tests_parcel")
        return temporary(
            "CREATE TRIGGER tests_drop BEFORE UPDATE ON tests_parcel WHEN OLD.priority = 1 "
            "BEGIN SELECT RAISE(IGNORE); END",
            "DROP TRIGGER tests_drop",
        )

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_a_flip_that_a_trigger_drops_fails_its_row(batch_size: int) -> None:
        parcels(3)
        with drop_the_flip_of_place_1():
            report = in_batches(lambda row: None, batch_size=batch_size)()
        assert_run(report, processed=2, failed=1)
        assert "look for a trigger" in str(report.failures[0].error)
        assert sent() == [0, 2]


# --- a constant flip that takes some rows out of pending, and leaves others in it


#: What is not done, and what is at place 2 whether it is done or not.
SOME_STAY = Q(done=False) | Q(place=2)


@pytest.mark.parametrize("stays", [Q(), Q(depot__name=None)], ids=["own", "spanning"])
@the.each_size
@pytest.mark.parametrize("done", [{"sent": True}, {"sent": lambda: True, "tries": F("tries") + 1}])
def test_a_row_that_stays_is_refused_by_name_and_rolled_back(
    stays: Q, size: int, done: Any
) -> None:
    parcels(5)

    pending = Parcel.objects.filter(Q(sent=False) | (Q(priority=2) & stays))
    report = in_batches(note, pending=pending, done=done, batch_size=size)()
    assert_run(report, processed=4, failed=1)
    assert isinstance(report.failures[0].error, StillPending)
    row = Parcel.objects.get(priority=2)
    assert (row.sent, row.note, report.failures[0].pk) == (False, "", row.pk)
    assert Parcel.objects.filter(sent=True, note="worked").count() == 4


@the.each_size
def test_at_least_once_takes_the_flip_back_and_frees_the_lease(size: int) -> None:
    the.errands(5)
    run = the.at_least_once(the.ignore, pending=Errand.objects.filter(SOME_STAY), batch_size=size)
    report = run()
    assert_run(report, processed=4, failed=1)
    assert isinstance(report.failures[0].error, StillPending)
    assert not Errand.objects.exclude(leased_until=None).exists()
    assert the.places(done=False) == [2]


@the.each_size
@pytest.mark.parametrize("claim", [{"claimed": True}, None], ids=["claim", "flip"])
def test_at_most_once_calls_no_handler_for_a_row_that_its_mark_leaves_pending(
    size: int, claim: Any
) -> None:
    """Committed, such a mark would let another copy call the handler a second time."""
    the.errands(5)
    calls: list[int] = []
    column = "claimed" if claim else "done"
    run = the.at_most_once(
        lambda row: calls.append(row.place),
        pending=Errand.objects.filter(Q(**{column: False}) | Q(place=3), done=False)
        if claim
        else Errand.objects.filter(Q(done=False) | Q(place=3)),
        claim=claim,
        claimed_at="claimed_at" if claim else None,
        batch_size=size,
    )
    for processed in (4, 0):
        report = run()
        assert_run(report, processed=processed, failed=1)
        [place] = Errand.objects.filter(pk=report.failures[0].pk).values_list("place", flat=True)
        assert place == 3
        assert "to keep other workers from it" in str(report.failures[0].error)
    assert sorted(calls) == [0, 1, 2, 4]
    assert the.places(**{column: True}) == [0, 1, 2, 4]


def test_a_flip_is_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    the.errands(3)
    saved: list[Any] = []
    field = Errand._meta.get_field("claimed_at")
    monkeypatch.setattr(field, "auto_now", True)

    def note(instance: Any, **_: Any) -> None:
        saved.append(instance)

    post_save.connect(note, sender=Errand)
    try:
        assert_run(the.transactional(the.ignore)(), processed=3)
    finally:
        post_save.disconnect(note, sender=Errand)
    assert not saved
    assert Errand.objects.filter(claimed_at=None, done=True).count() == 3


# --- another value for each row of a batch


@pytest.mark.parametrize(
    ("one", "other"), [(True, 1), (0.0, -0.0), (Decimal("1.0"), Decimal("1.00"))]
)
def test_values_that_python_calls_equal_and_the_column_does_not_are_told_apart(
    one: Any, other: Any
) -> None:
    parcels(3)
    values = ["alone", one, other]

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        return {"sent": True, "note": values[row.priority]}

    assert_run(in_batches(lambda row: None, done=done)(), processed=3)
    notes = Parcel.objects.order_by("priority").values_list("note", flat=True)
    assert notes[2] == str(other)
    assert notes[1] in {str(one), "true", "1"}


def test_a_callable_gives_each_row_a_value_of_its_own() -> None:
    parcels(5)
    drawn: list[str] = []

    def draw() -> str:
        drawn.append(uuid.uuid4().hex[:20])
        return drawn[-1]

    done = {"sent": True, "code": draw}
    assert_run(in_batches(lambda row: None, done=done)(), processed=5)
    assert len(drawn) == 6  # once in the trial
    assert Parcel.objects.values("code").distinct().count() == 5


def test_a_clock_gives_all_rows_of_a_batch_one_value_in_one_statement() -> None:
    parcels(5)
    with statements() as seen:
        in_batches(lambda row: None, done={"sent": True, "sent_at": timezone.now})()
    assert len(flips(seen)) == 1
    assert Parcel.objects.values("sent_at").distinct().count() == 1
