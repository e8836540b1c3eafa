"""What a batch's flips write, and to which rows."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.signals import post_save
from django.utils import timezone

from dcl_processor import BatchProcessor, Report, batch_processor
from dcl_processor.exceptions import StillPending
from tests.contract.support import errands as the
from tests.contract.support.batches import flips, sent, statements
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.temporary import at_update, temporary
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


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


def test_one_row_that_stays_pending_costs_the_others_nothing() -> None:
    parcels(4)

    def handle(row: Parcel) -> None:
        if row.priority != 1:
            Parcel.objects.filter(pk=row.pk).update(sent=True)

    report = in_batches(handle, done=None)()
    assert_run(report, processed=3, failed=1)
    assert isinstance(report.failures[0].error, StillPending)
    assert sent() == [0, 2, 3]


class Vector(list[int]):
    """Compares element by element, as numpy's arrays do, and is as shy of repr()."""

    __hash__ = None

    def __eq__(self, other: object) -> Any:
        return Vector([1, 0])

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a vector is ambiguous")

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __str__(self) -> str:
        return "-".join(map(str, [*self]))


class Stamp:
    """A callable that equals all of its kind, and so has no hash."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stamp)

    __hash__ = None  # type: ignore[assignment]  # what Python makes of it

    def __call__(self) -> str:
        return f"stamp {self.place}"


def make_vector(place: int) -> Any:
    return Vector([place, place])


@pytest.mark.parametrize(
    ("make", "texts"),
    [(make_vector, ["0-0", "1-1", "2-2"]), (Stamp, ["stamp 0", "stamp 1", "stamp 2"])],
)
@pytest.mark.parametrize("size", [1, 3])
def test_values_are_not_compared(make: Any, texts: list[str], size: int) -> None:
    """``==`` and ``hash()`` are the users' own, and need not work."""
    parcels(3)
    calls: list[int] = []

    def done(row: Parcel, result: Any) -> dict[str, Any]:
        calls.append(row.priority)
        return {"sent": True, "note": make(row.priority)}

    report = in_batches(lambda row: None, done=done, batch_size=size)()
    assert_run(report, processed=3)
    assert sorted(calls) == [0, 1, 2]
    assert list(Parcel.objects.order_by("priority").values_list("note", flat=True)) == texts


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

#: The same for parcels, asked in one statement and in two.
PARCELS = {
    "own": lambda: Parcel.objects.filter(Q(sent=False) | Q(priority=2)),
    "spanning": lambda: Parcel.objects.filter(Q(sent=False) | Q(depot__isnull=True, priority=2)),
}
each_question = pytest.mark.parametrize("question", PARCELS.values(), ids=PARCELS)
each_size = pytest.mark.parametrize("size", [1, 3])


def failed_places(report: Report) -> list[int]:
    assert all(isinstance(each.error, StillPending) for each in report.failures)
    return [Errand.objects.get(pk=each.pk).place for each in report.failures]


@each_question
@each_size
@pytest.mark.parametrize("done", [{"sent": True}, {"sent": lambda: True, "tries": F("tries") + 1}])
def test_a_row_that_stays_is_refused_by_name_and_rolled_back(
    question: Any, size: int, done: Any
) -> None:
    parcels(5)

    def handle(row: Parcel) -> None:
        Parcel.objects.filter(pk=row.pk).update(note="worked")

    run: BatchProcessor[Parcel] = batch_processor(pending=question, done=done, batch_size=size)(
        handle
    )
    report = run()
    assert_run(report, processed=4, failed=1)
    assert isinstance(report.failures[0].error, StillPending)
    stays = Parcel.objects.get(priority=2)
    assert (stays.sent, stays.note, report.failures[0].pk) == (False, "", stays.pk)
    assert Parcel.objects.filter(sent=True, note="worked").count() == 4


@each_size
def test_at_least_once_takes_the_flip_back_and_frees_the_lease(size: int) -> None:
    the.errands(5)
    run = the.at_least_once(the.ignore, pending=Errand.objects.filter(SOME_STAY), batch_size=size)
    report = run()
    assert_run(report, processed=4, failed=1)
    assert failed_places(report) == [2]
    assert not Errand.objects.exclude(leased_until=None).exists()
    assert list(Errand.objects.filter(done=False).values_list("place", flat=True)) == [2]


def test_at_least_once_asks_after_a_flip_that_is_computed() -> None:
    the.errands(5)
    run = the.at_least_once(
        the.ignore, pending=Errand.objects.exclude(place=2), done={"place": F("place") * 2 + 2}
    )
    Errand.objects.filter(place__lt=2).update(place=0)
    report = run()
    assert_run(report, processed=2, failed=2)
    assert failed_places(report) == [3, 4]


@each_size
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


def each_costs(make: Any, **options: Any) -> float:
    """Return the statements that each further row costs, which what a run costs once does not."""
    run: BatchProcessor[Any] = batch_processor(**options)(the.ignore)
    spent = []
    for number in (1, 2, 7):  # the first on a connection asks for its isolation level
        make(number)
        with statements() as seen:
            assert_run(run(), processed=number)
        spent.append(len(seen))
    return (spent[2] - spent[1]) / 5


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Parcel.objects.filter(Q(sent=False) | Q(sent__isnull=True)).order_by("-priority"),
        lambda: Parcel.objects.filter(Q(sent=False) | Q(tries__lt=0)),
    ],
)
def test_what_the_flip_decides_for_all_rows_alike_is_not_asked_again(ask: Any) -> None:
    values = {"sent": True, "tries": 1}
    asked = each_costs(parcels, pending=ask, done=values)
    Parcel.objects.all().delete()
    plain = each_costs(parcels, pending=lambda: Parcel.objects.filter(sent=False), done=values)
    assert asked == plain


def test_a_durable_block_is_refused_in_the_rows_transaction() -> None:
    the.errands(3)

    def handle(_: Errand) -> None:
        with transaction.atomic(durable=True):
            raise AssertionError("expected the block to be refused")

    report = the.transactional(handle)()
    assert_run(report, failed=3)
    assert {type(failure.error) for failure in report.failures} == {RuntimeError}


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
