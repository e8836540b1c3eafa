"""Stage 1: windows of keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dcl_processor import batch_processor
from dcl_processor.pending import scan
from dcl_processor.pending.question import ask
from tests.contract.support.parcels import parcels
from tests.contract.support.reports import assert_run
from tests.models import Parcel, Scan, Voucher

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WINDOW", 3)
    monkeypatch.setattr(scan, "WIDE_WINDOW", 6)


unsent = Parcel.objects.filter(sent=False)
ask_unsent = partial(ask, unsent, label="test")
in_both_orders = pytest.mark.parametrize("order", [(), ("pk",)], ids=["by key", "in order"])


@in_both_orders
def test_i6_keys_that_arrive_ahead_of_the_scan_do_not_make_it_endless(order: Any) -> None:
    """Each handled row leaves three behind it that sort between it and the upper end."""
    Voucher.objects.bulk_create([Voucher(code=code) for code in ["a", "b", "c", "d", "z"]])
    made = iter(range(10**6))

    def handle(row: Voucher) -> None:
        assert next(made) < 300
        for _ in range(3):
            Voucher.objects.create(code=f"m{next(made):06}")

    pending = Voucher.objects.filter(sent=False).order_by(*order)
    run = batch_processor(pending=pending, done={"sent": True})(handle)
    report = run()
    assert report.processed < 50
    assert_run(report, processed=report.processed)
    assert Voucher.objects.filter(sent=False).exists()


@in_both_orders
def test_i6_rows_that_put_each_other_back_do_not_make_it_endless(order: Any) -> None:
    """Among other workers too, where a window is read again and again."""
    rows = parcels(5)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        assert len(calls) < 50
        if len(calls) == 1:
            # Finished by another copy: now the run knows that it is not alone.
            Parcel.objects.using("other").filter(pk=rows[1].pk).update(sent=True)
        Parcel.objects.filter(sent=True).exclude(pk=rows[1].pk).update(sent=False)

    run = batch_processor(pending=unsent.order_by(*order), done={"sent": True})(handle)
    assert_run(run(), processed=len(calls), stale=1)
    assert len(calls) < 20


def test_i8_an_order_forgets_the_rows_that_others_finished() -> None:
    rows = parcels(60)
    tried: set[int] = set()
    longest = 0
    for asked, pks in scan.Scan(ask_unsent, tried).in_order():
        longest = max(longest, len(tried))
        for pk in pks:
            tried.add(pk)  # not there to be claimed: another copy has just finished it
            asked.queryset.filter(pk=pk).update(sent=True)
    assert longest <= 2 * scan.WINDOW
    assert not unsent.exists()
    assert len(rows) == 60


def test_i8_keys_that_were_tried_are_forgotten_behind_the_scan() -> None:
    parcels(20)
    tried: set[Any] = set()
    most = 0
    for _, waiting in scan.Scan(ask_unsent, tried):
        tried.update(waiting)
        waiting.clear()
        most = max(most, len(tried))
    assert most == scan.WINDOW


def test_rows_that_fail_in_an_order_are_read_past_however_often_each_comes() -> None:
    """Once for each of its scans, of which a row has more than a window holds."""
    rows = parcels(8)
    Scan.objects.bulk_create([Scan(parcel=row) for row in rows for _ in range(5)])
    calls: list[Any] = []

    def fail(row: Parcel) -> None:
        calls.append(row.pk)
        raise ValueError

    scanned = unsent.filter(scans__ok=True).order_by("pk")
    report = batch_processor(pending=scanned, done={"sent": True})(fail)()
    assert_run(report, failed=8)
    assert calls == [row.pk for row in rows]
