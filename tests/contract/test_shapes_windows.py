"""I6 for every shape and kind of key: several windows, and every row once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from dcl_processor import batch_processor
from dcl_processor.pending import scan
from tests.contract.support.gate import before_lock
from tests.contract.support.own_shapes import OWN
from tests.contract.support.reports import assert_run
from tests.contract.support.shapes import Shape
from tests.contract.support.spanning_shapes import SPANNING
from tests.contract.test_shapes import keys, processor
from tests.models import Letter, Seat, Voucher

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CODES = ["b", "ä", "A1", "a2", "Z", "_", "zz", "é", "f", "E1", "0"]


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WINDOW", 2)
    monkeypatch.setattr(scan, "WIDE_WINDOW", 3)


@pytest.mark.parametrize("shape", [*OWN, *SPANNING], ids=str)
def test_every_row_comes_once_over_several_windows(shape: Shape) -> None:
    rows = [shape.make() for _ in range(5)]
    calls: list[Any] = []
    report = processor(shape, calls)(filter=shape.filter).raise_for_failures()
    assert keys(calls) == keys(rows)
    assert_run(report, processed=5, passes=1)


def fill(model: Any) -> None:
    if model is Seat:
        model.objects.bulk_create([Seat(row=n % 4, number=n) for n in range(11)])
    elif model is Voucher:
        model.objects.bulk_create([Voucher(code=code) for code in CODES])
    else:
        model.objects.bulk_create([Letter() for _ in range(11)])


@pytest.mark.parametrize("among_others", [False, True])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("model", [Letter, Seat, Voucher])
def test_keys_of_other_kinds_are_scanned_to_their_end(
    model: Any, is_ordered: bool, among_others: bool
) -> None:
    """By the database's order of keys, which need not be that of Python."""
    fill(model)
    unsent = model.objects.filter(sent=False)
    last, second = unsent.order_by("pk").last(), unsent.order_by("pk")[1]
    seen: list[Any] = []
    pending = unsent.order_by("pk") if is_ordered else unsent
    run = batch_processor(pending=pending, done={"sent": True})
    send = run(lambda row: seen.append(row.pk))

    def finish() -> None:
        model.objects.using("other").filter(pk=second.pk).update(sent=True)

    with before_lock(finish, at=1) if among_others else nullcontext():
        report = send(timeout=60).raise_for_failures()
    assert len(seen) == len(set(seen)) == 11 - among_others
    assert_run(report, processed=11 - among_others, stale=among_others)
    assert last.pk in seen
    assert not unsent.exists()
