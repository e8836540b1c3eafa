"""A claim among other workers: it takes the first rows that can be had of those that come next.

It is one statement more that locks and asks, so whatever holds of the other ones has to hold of it.
Elsewhere than on PostgreSQL a claim names the rows that it is to take, and there is no choice.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from dcl_processor import Report, batch_processor
from dcl_processor.pending import scan
from dcl_processor.pending.question import ask
from tests.contract.support import errands as the
from tests.contract.support.expression_shapes import EXPRESSIONS
from tests.contract.support.gate import other_than, run_and_meanwhile
from tests.contract.support.own_shapes import OWN
from tests.contract.support.parcels import UNSENT, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.shapes import Shape, lock, row_of
from tests.contract.support.spanning_shapes import SPANNING
from tests.contract.support.wanted import held, refuse_to_load
from tests.contract.test_shapes import is_pending, keys, processor
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


# --- the second check


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
        assert_run(report, processed=1, skipped=1, stale=1)
    assert_run(processor(shape, calls)(filter=shape.filter), processed=1)
    assert keys(calls) == keys([plain, held])
    assert not any(is_pending(shape, row) for row in (finished, held, plain))


@pytest.mark.usefixtures("choosing")
@the.each_delivery
def test_i2_nor_by_the_statement_that_claims_and_marks(make: Any) -> None:
    """The first row is rehearsed with; the second claim is the one statement that commits."""
    rows = the.errands(5)
    calls: list[int] = []
    run = make(lambda row: calls.append(row.pk))

    def meanwhile() -> None:
        Errand.objects.using("other").filter(pk=rows[1].pk).update(done=True)

    report = run_and_meanwhile(run, meanwhile, at=1)
    assert calls == [row.pk for row in rows if row != rows[1]]
    assert_run(report, processed=4, stale=1)


# --- what it takes


@pytest.mark.usefixtures("choosing")
@the.all_deliveries
@pytest.mark.parametrize("size", [1, 2])
def test_no_more_rows_are_taken_than_are_handled_now(make: Any, size: int) -> None:
    """The others are free for other workers, and as they were."""
    rows = the.errands(6)
    free: list[int] = []

    def handle(row: Errand) -> None:
        with transaction.atomic(using="other"):
            others = the.PENDING.using("other").filter(leased_until=None)
            free.append(len(others.select_for_update(skip_locked=True)))

    report = make(handle, batch_size=size)()
    assert_run(report, processed=len(rows))
    expected = [6 - size * (1 + place // size) for place in range(6)]
    assert free == expected


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


# --- order


ORDERS: dict[str, Any] = {
    "a column": UNSENT.order_by("-priority"),
    "across": UNSENT.order_by("depot__name", "-pk"),
    "an expression": UNSENT.order_by((F("priority") % 7).desc(nulls_last=True)),
    "reversed": UNSENT.order_by("pk").reverse(),
    "extra": UNSENT.extra(order_by=["-priority", "id"]),
}


@pytest.mark.parametrize("asked", ORDERS.values(), ids=ORDERS)
def test_an_order_is_kept_among_others_and_costs_a_row_no_statement_more(asked: Any) -> None:
    """Every other row is held, from the head on."""
    depots = [Depot.objects.create(name=name) for name in ("south", "north")]
    rows = parcels(40, weight=1)
    for place, row in enumerate(rows):
        Parcel.objects.filter(pk=row.pk).update(depot=depots[place % 2])
    question = ask(asked, label="test")
    [(_, window)] = scan.ordered_scan(lambda: question, set())
    in_order = list(window)
    assert len(in_order) == 40
    calls: list[int] = []
    run = batch_processor(pending=asked, done={"sent": True})(lambda row: calls.append(row.pk))
    others = [row for row in rows if row.pk in in_order[::2]]
    with held(others), CaptureQueriesContext(connection) as queries:
        report = run(wait_for_locked=0)
    assert calls == in_order[1::2]
    assert_run(report, processed=20, skipped=20)
    # One without a row, which showed another worker, and one that found nothing free at the end.
    assert sum("SKIP LOCKED" in query["sql"] for query in queries) <= 20 + 2
