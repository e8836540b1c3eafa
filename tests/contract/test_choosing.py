"""A claim among other copies: it takes the first rows that can be had of those that come next.

It is one statement more that locks and asks, so whatever holds of the other ones has to hold of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F, QuerySet
from django.test.utils import CaptureQueriesContext

from dcl_processor import BatchProcessor, Report, batch_processor
from dcl_processor.candidates import pending, windows
from dcl_processor.locking import choosing as claims
from dcl_processor.runner.patience import Patience
from tests.contract import errands as the
from tests.contract.expression_shapes import EXPRESSIONS
from tests.contract.gate import HAS_GATE, other_than, run_and_meanwhile
from tests.contract.own_shapes import OWN
from tests.contract.shapes import Shape, lock, row_of
from tests.contract.spanning_shapes import SPANNING
from tests.contract.test_shapes import is_pending, keys, processor
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: Elsewhere a claim names the rows that it is to take, and there is nothing to choose.
chooses = pytest.mark.skipif(not HAS_GATE, reason="the database locks what it looks at")

unsent = Parcel.objects.filter(sent=False)


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run choose from its first claim on, as if it had met another copy before."""
    monkeypatch.setattr(Patience, "wants_choice", lambda self, *, own_table: True)


def parcels(number: int, **columns: Any) -> list[Parcel]:
    rows = [Parcel(priority=place, **columns) for place in range(number)]
    return Parcel.objects.bulk_create(rows)


def transactional(handler: Any, **options: Any) -> BatchProcessor[Errand]:
    return batch_processor(pending=the.PENDING, done={"done": True}, **options)(handler)


def hold(stack: ExitStack, rows: list[Parcel]) -> None:
    stack.enter_context(transaction.atomic(using="other"))
    locked = Parcel.objects.using("other").filter(pk__in=[row.pk for row in rows])
    assert len(locked.select_for_update()) == len(rows)


# --- the second check


@chooses
@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("shape", [*OWN, *SPANNING, *EXPRESSIONS], ids=str)
def test_i2_a_row_that_is_finished_between_snapshot_and_lock_is_not_chosen(shape: Shape) -> None:
    """Nor one that is held; the next one is taken in their place, and the held one at the end."""
    finished, held, plain = (shape.make() for _ in range(3))
    outsider = other_than(shape.using)
    calls: list[Any] = []
    with ExitStack() as stack:

        def meanwhile() -> None:
            shape.finish_as_another_copy(finished, outsider)
            stack.enter_context(transaction.atomic(using=outsider))
            assert lock(row_of(held, outsider))

        def run() -> Report:
            return processor(shape, calls)(filter=shape.filter, wait_for_locked=0)

        report = run_and_meanwhile(run, meanwhile, using=shape.using)
        assert keys(calls) == keys([plain])
        assert (report.processed, report.failed, report.skipped) == (1, 0, 1)
    assert processor(shape, calls)(filter=shape.filter).processed == 1
    assert keys(calls) == keys([plain, held])
    assert not any(is_pending(shape, row) for row in (finished, held, plain))


@chooses
@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("make", [the.at_most_once, the.at_least_once])
def test_i2_nor_by_the_statement_that_claims_and_marks(make: Any) -> None:
    """The first row is rehearsed with; the second claim is the one statement that commits."""
    rows = the.errands(5)
    calls: list[int] = []
    run = make(lambda row: calls.append(row.pk))

    def meanwhile() -> None:
        Errand.objects.using("other").filter(pk=rows[1].pk).update(done=True)

    report = run_and_meanwhile(run, meanwhile, at=1)
    assert calls == [row.pk for row in rows if row != rows[1]]
    assert (report.processed, report.stale) == (4, 1)


# --- what it takes


@chooses
@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("make", [transactional, the.at_most_once, the.at_least_once])
@pytest.mark.parametrize("size", [1, 2])
def test_no_more_rows_are_taken_than_are_handled_now(make: Any, size: int) -> None:
    """The others are free for other copies, and as they were."""
    rows = the.errands(6)
    free: list[int] = []

    def handle(row: Errand) -> None:
        with transaction.atomic(using="other"):
            others = the.PENDING.using("other").filter(leased_until=None)
            free.append(len(others.select_for_update(skip_locked=True)))

    report = make(handle, batch_size=size)()
    assert report.processed == len(rows)
    expected = [6 - size * (1 + place // size) for place in range(6)]
    assert free == expected


@chooses
@pytest.mark.usefixtures("choosing")
def test_a_limit_is_kept() -> None:
    parcels(9)
    run = batch_processor(pending=unsent, done={"sent": True}, batch_size=4)(lambda row: None)
    assert [run(limit=limit).processed for limit in (1, 6, 6)] == [1, 6, 2]


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("own_table", [True, False])
def test_a_row_that_cannot_be_loaded_costs_the_others_nothing(
    own_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = parcels(5)
    load = Parcel.from_db.__func__  # type: ignore[attr-defined]

    def from_db(cls: Any, *args: Any, **kwargs: Any) -> Any:
        row = load(cls, *args, **kwargs)
        if row.pk == rows[1].pk:
            raise ValueError("corrupt")
        return row

    monkeypatch.setattr(Parcel, "from_db", classmethod(from_db))
    calls: list[int] = []
    asked = unsent if own_table else unsent.filter(pk__in=unsent.values("pk"))
    run = batch_processor(pending=asked, done={"sent": True})(lambda row: calls.append(row.pk))
    report = run()
    assert calls == [row.pk for row in rows if row != rows[1]]
    assert (report.processed, report.failed) == (4, 1)


@chooses
def test_rows_that_are_held_in_bulk_take_few_statements() -> None:
    rows = parcels(300)
    calls: list[int] = []
    run = batch_processor(pending=unsent, done={"sent": True})(lambda row: calls.append(row.pk))
    with ExitStack() as stack:
        hold(stack, rows[:250])
        with CaptureQueriesContext(connection) as queries:
            report = run(wait_for_locked=0)
    assert (report.processed, report.skipped) == (50, 250)
    locks = [query for query in queries if "SKIP LOCKED" in query["sql"]]
    assert len(locks) < 50 + 250 / 10


# --- order


@chooses
@pytest.mark.parametrize(
    "order", [(), ("-priority",), ("weight", "-priority"), ("weight",)], ids=str
)
def test_a_strict_order_is_kept_among_others_and_costs_a_row_no_statement_more(
    order: tuple[str, ...],
) -> None:
    """Every other row is held, from the head on."""
    rows = parcels(40, weight=1)
    in_order = list(unsent.order_by(*order, "pk").values_list("pk", flat=True))
    run = batch_processor(pending=unsent.order_by(*order), done={"sent": True}, strict_order=True)(
        lambda row: calls.append(row.pk)
    )
    calls: list[int] = []
    with ExitStack() as stack:
        hold(stack, [row for row in rows if row.pk in in_order[::2]])
        with CaptureQueriesContext(connection) as queries:
            report = run(wait_for_locked=0)
    assert calls == in_order[1::2]
    assert (report.processed, report.skipped) == (20, 20)
    # One in vain, which told that somebody is there, and one that found nothing free at the end.
    assert sum("SKIP LOCKED" in query["sql"] for query in queries) <= 20 + 2


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        (unsent, ("pk",)),
        (unsent.order_by("-priority"), ("-priority", "pk")),
        (unsent.order_by("depot_id"), ("depot_id", "pk")),
        (unsent.order_by("depot"), None),
        (unsent.order_by("depot__name"), None),
        (unsent.order_by(F("weight").desc(nulls_last=True)), None),
        (unsent.order_by("?"), None),
        (unsent.order_by("priority").reverse(), None),
        (unsent.extra(order_by=["priority"]), None),
    ],
    ids=lambda value: str(value.query)[-40:] if isinstance(value, QuerySet) else str(value),
)
def test_only_an_order_by_columns_of_the_rows_own_is_for_a_claim(asked: Any, order: Any) -> None:
    Depot.objects.create(name="north")
    question = pending.ask(asked, label="test")
    assert question.plain_order == order
    chosen = claims.choice(question)
    assert chosen == (claims.CHOICE if HAS_GATE and order else 0)


@pytest.mark.parametrize("order", ["depot__name", "?"])
def test_any_other_order_goes_on_row_by_row(order: str) -> None:
    rows = parcels(10, depot=Depot.objects.create(name="north"))
    calls: list[int] = []
    run = batch_processor(pending=unsent.order_by(order), done={"sent": True}, strict_order=True)(
        lambda row: calls.append(row.pk)
    )
    if connection.features.has_select_for_update:
        with ExitStack() as stack:
            hold(stack, rows[:5])
            assert run(wait_for_locked=0).skipped == 5
    assert run().failed == 0
    assert sorted(calls) == [row.pk for row in rows]


# --- the walk


def test_a_copy_that_often_looks_again_still_visits_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was shown and did not visit is not counted as visited."""
    monkeypatch.setattr(windows, "WINDOW", 4)
    monkeypatch.setattr(windows, "WIDE_WINDOW", 6)
    monkeypatch.setattr(claims, "CHOICE", 0)
    parcels(60)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        if connection.features.has_select_for_update:
            # Another copy finishes the one that would be next.
            others = Parcel.objects.using("other").filter(sent=False, pk__gt=row.pk)
            taken = others.order_by("pk").values_list("pk", flat=True)[:1]
            Parcel.objects.using("other").filter(pk__in=list(taken)).update(sent=True)

    report = batch_processor(pending=unsent, done={"sent": True})(handle)()
    assert not unsent.exists()
    assert report.processed == len(calls) == len(set(calls)) >= 30
