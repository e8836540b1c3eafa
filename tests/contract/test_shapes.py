"""I2, I3, I4 and I12 for every accepted shape of pending queryset, on every database."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import pytest
from django.apps import apps
from django.db import transaction
from django.db.models import CharField, Model, QuerySet

from dcl_processor import BatchProcessor, Report, batch_processor
from tests import seams
from tests.contract.support.gate import (
    HAS_GATE,
    HAS_ROW_LOCKS,
    before_lock,
    other_than,
    run_and_meanwhile,
)
from tests.contract.support.own_shapes import OWN
from tests.contract.support.reports import assert_run
from tests.contract.support.shapes import Shape, lock, row_of
from tests.contract.support.spanning_shapes import SPANNING
from tests.models import OpenParcel, Parcel, Seat, Truck

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHAPES = [*OWN, *SPANNING]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def processor(shape: Shape, calls: list[Any]) -> BatchProcessor[Any]:
    def handle(row: Any) -> None:
        calls.append(row)
        if shape.done is None:
            shape.take_out(row, shape.using)

    make = batch_processor(pending=shape.pending, done=shape.done)
    return make(handle)


def run(shape: Shape, calls: list[Any], **parameters: Any) -> Report:
    report = processor(shape, calls)(filter=shape.filter, **parameters)
    return report.raise_for_failures()


def keys(rows: list[Any]) -> list[Any]:
    return sorted(row.pk for row in rows)


def is_pending(shape: Shape, row: Model) -> bool:
    with transaction.atomic(using=shape.using):
        return shape.queryset().filter(pk=row.pk).exists()


@pytest.mark.parametrize("order", [(), ("pk",)])
def test_i1_none_costs_no_statement_at_all(order: Any, django_assert_num_queries: Any) -> None:
    Parcel.objects.create()
    for nothing in (
        Parcel.objects.none(),
        Parcel.objects.filter(sent=False) & Parcel.objects.none(),
        Parcel.objects.filter(pk__in=[]),
        Truck.objects.none().order_by("plate"),
        Seat.objects.none().filter(sent=False),
    ):
        make = batch_processor(pending=nothing.order_by(*order))
        with django_assert_num_queries(0):
            assert_run(make(lambda row: None)())


@every_shape
def test_i2_what_others_do_between_the_read_and_the_claim(shape: Shape) -> None:
    """Finished and deleted rows are stale, edited ones fresh, locked ones skipped; then freed."""
    plain, edited, finished, deleted, held, over = (shape.make() for _ in range(6))
    outsider = other_than(shape.using)
    shape.take_out(over, outsider)
    calls: list[Any] = []
    with ExitStack() as hold:

        def meanwhile() -> None:
            shape.finish_as_another_copy(finished, outsider)
            row_of(deleted, outsider).get().delete()
            edit(shape, edited, outsider)
            if HAS_ROW_LOCKS:
                hold.enter_context(transaction.atomic(using=outsider))
                assert lock(row_of(held, outsider))

        with before_lock(meanwhile, using=shape.using):
            report = run(shape, calls, wait_for_locked=0)
        if HAS_ROW_LOCKS:
            assert report.stale <= 2  # those that were met before the window was read again
            assert_run(report, processed=2, skipped=1, stale=report.stale, passes=1)
            assert keys(calls) == keys([plain, edited])
            with before_lock(hold.close, using=shape.using, at=1):
                report = run(shape, calls, wait_for_locked=30)
            assert_run(report, processed=1, passes=2)
    assert keys(calls) == keys([plain, edited, held])
    [row] = [row for row in calls if row.pk == edited.pk]
    if shape.spare is not None:
        assert getattr(row, shape.spare) == spare_value(row, shape.spare)
    assert not any(is_pending(shape, row) for row in (plain, edited, finished, held, over))
    assert_run(run(shape, calls))


def edit(shape: Shape, row: Model, using: str) -> None:
    if shape.spare is not None:
        row_of(row, using).update(**{shape.spare: spare_value(row, shape.spare)})


def spare_value(row: Model, column: str) -> Any:
    return "edited" if isinstance(row._meta.get_field(column), CharField) else 42


#: A change beside the row does not ask for its lock.
WAYS = [
    (shape, way)
    for shape in SHAPES
    for way in ("finished", "left")
    if way == "finished" or shape.leave
]


@pytest.mark.parametrize(("shape", "way"), WAYS, ids=str)
def test_i2_finished_between_the_snapshot_and_the_lock(shape: Shape, way: str) -> None:
    row = shape.make()
    calls: list[Any] = []

    def act() -> None:
        if way == "left" and shape.leave is not None:
            shape.leave(row.pk, other_than(shape.using))
        else:
            shape.finish_as_another_copy(row, other_than(shape.using))

    report = run_and_meanwhile(lambda: run(shape, calls), act, using=shape.using)
    assert_run(report, stale=1)
    assert calls == []
    assert not is_pending(shape, row)


if HAS_ROW_LOCKS:

    @every_shape
    def test_i4_only_the_rows_own_tables_are_locked(shape: Shape) -> None:
        for _ in range(3):
            shape.make()
        locked: list[dict[type[Model], int]] = []
        probed = processor(shape, [])
        handle = probed.process

        def probe(row: Any) -> None:
            locked.append(locked_rows(other_than(shape.using)))
            handle(row)

        probed.process = probe  # type: ignore[method-assign]
        probed(filter=shape.filter, limit=1).raise_for_failures()
        own = Parcel if shape.model() is OpenParcel else shape.model()
        assert locked == [{own: 1}]


def locked_rows(using: str) -> dict[type[Model], int]:
    """Count the rows of each table that other sessions have locked."""
    locked: dict[type[Model], int] = {}
    models = apps.get_app_config("tests").get_models(include_auto_created=True)
    with transaction.atomic(using=using):
        for model in models:
            if model._meta.proxy or not model._meta.managed:
                continue
            rows: QuerySet[Model] = QuerySet(model, using=using).order_by()
            free = len(rows.select_for_update(skip_locked=True).values_list("pk"))
            if missing := rows.count() - free:
                locked[model] = missing
        transaction.set_rollback(True, using=using)
    return locked


if HAS_GATE:
    # Of a row in two tables, the lock of both would look again at both.
    DOUBLES = [each for each in SHAPES if each.is_double and not each.model()._meta.parents]

    @pytest.mark.parametrize("shape", DOUBLES, ids=str)
    def test_one_statement_hands_out_what_is_not_pending(
        shape: Shape, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A broken variant, which asks each question with the lock: this harness finds its doubles.

        Its snapshot is older than its lock, and PostgreSQL looks again at the locked row alone.
        """
        questions = itertools.count()  # the claim's, and then the flip's
        seams.replace(monkeypatch, seams.IS_OWN_TABLE, lambda _: next(questions) % 2 == 0)
        own = f'FOR NO KEY UPDATE OF "{shape.model()._meta.db_table}" SKIP LOCKED'
        seams.replace(monkeypatch, seams.LOCK, own)
        row = shape.make()
        calls: list[Any] = []
        broken = processor(shape, calls)
        outsider = other_than(shape.using)

        def act() -> None:
            if shape.leave is not None:
                shape.leave(row.pk, outsider)
            else:
                shape.finish_as_another_copy(row, outsider)

        run_and_meanwhile(lambda: broken(filter=shape.filter), act, using=shape.using)
        assert [each.pk for each in calls] == [row.pk]
