"""The promises, each under its number, on every database."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import Event
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from dcl_processor.engine import source
from dcl_processor.exceptions import StillPending
from dcl_processor.pending import scan
from tests.contract.support.clocks import Clock, Waits
from tests.contract.support.errands import ignore
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.parcels import parcels, processor, statements
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import part_locked, uncommitted
from tests.models import Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def another_session_holds(*pks: Any) -> AbstractContextManager[Callable[[], None]]:
    """Finish rows in another session, which commits at the end, or at a sign."""
    return uncommitted(lambda: Parcel.objects.filter(pk__in=pks).update(sent=True))


def test_i1_empty_is_free() -> None:
    parcels(3, sent=True)
    run = processor(ignore)
    with CaptureQueriesContext(connection) as queries:
        report = run()
    assert len(queries) == 1
    assert queries[0]["sql"].startswith("SELECT")
    assert "FOR" not in queries[0]["sql"].replace("FROM", "")
    assert not connection.in_atomic_block
    assert_run(report, passes=1)


def test_a_row_costs_two_statements_once_the_flip_was_tried() -> None:
    """Lock-and-ask, flip: own-table. Without RETURNING the flip is asked about by one more."""
    parcels(1)
    run = processor(ignore)
    run()  # the connection has been asked for its isolation level
    Parcel.objects.update(sent=False)
    with statements() as one:
        assert_run(run(), processed=1)
    parcels(20)
    with statements() as many:
        assert_run(run(), processed=20)

    def number(sent: list[str]) -> int:
        return sum(sql.split()[0] in {"SELECT", "UPDATE", "WITH"} for sql in sent)

    # SQLite: an empty update takes the lock for writing.
    each = {"postgresql": 2, "mysql": 3, "sqlite": 4}[connection.vendor]
    assert number(many) - number(one) == 19 * each


def test_i5_a_flip_that_leaves_the_row_pending_is_found_before_any_handler() -> None:
    rows = parcels(3)
    calls: list[int] = []
    run = processor(lambda row: calls.append(row.pk), done={"note": "sent"})
    with pytest.raises(StillPending, match=r"expected done=.* to take a row out .* still pending"):
        run()
    assert calls == []
    assert set(Parcel.objects.values_list("note", flat=True)) == {""}
    assert not connection.in_atomic_block
    assert len(rows) == Parcel.objects.filter(sent=False).count()


def test_i6_rows_that_keep_arriving_do_not_keep_a_run_going(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "WINDOW", 4)
    parcels(8)

    def handle(row: Parcel) -> None:
        assert Parcel.objects.count() < 100
        Parcel.objects.create(priority=row.priority + 100)
        Parcel.objects.create(priority=row.priority + 200)

    report = processor(handle)()
    assert_run(report, processed=8)
    assert Parcel.objects.filter(sent=False).count() == 16


def test_i6_a_sort_key_that_changes_makes_no_row_come_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "WINDOW", 3)
    parcels(10)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.pk)
        others = Parcel.objects.filter(sent=False).exclude(pk=row.pk)
        others.update(priority=1000 - len(calls) * 10 - row.pk)
        Parcel.objects.filter(pk=row.pk).update(priority=-1)

    pending = Parcel.objects.filter(sent=False).order_by("-priority")
    report = processor(handle, pending=pending)()
    assert_run(report, processed=10)
    assert len(set(calls)) == 10


def test_i6_locked_rows_are_tried_again_until_they_are_free() -> None:
    first, second, third = parcels(3)
    calls: list[int] = []
    run = processor(lambda row: calls.append(row.pk))
    with another_session_holds(first.pk) as commit:

        class Stop(Event):
            """Lets the other worker's row go when this one waits, after its first pass."""

            def wait(self, timeout: float | None = None) -> bool:
                commit()
                return super().wait(timeout)

        if not HAS_ROW_LOCKS:
            commit()  # SQLite: the other copy has the whole database
        report = run(wait_for_locked=30, stop=Stop())
    assert sorted(calls) == [second.pk, third.pk]
    assert report.passes > 1 or not HAS_ROW_LOCKS
    # On SQLite the other copy may have finished its row before ours has looked.
    assert_run(report, processed=2, stale=1 if HAS_ROW_LOCKS else report.stale)
    assert Parcel.objects.filter(sent=False).count() == 0


def test_i6_a_row_at_the_end_of_a_window_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "WINDOW", 2)
    rows = parcels(5)
    calls: list[int] = []

    def fail(row: Parcel) -> None:
        calls.append(row.pk)
        raise ValueError

    report = processor(fail)()
    assert_run(report, failed=5)
    assert calls == [row.pk for row in rows]


def test_i8_memory_does_not_grow_with_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the rows, the same peak: what is kept is a window, not a backlog."""
    monkeypatch.setattr(scan, "WINDOW", 20)
    run = processor(ignore)

    def peak(number: int) -> int:
        Parcel.objects.all().delete()
        parcels(number)
        tracemalloc.start()
        try:
            assert_run(run(), processed=number)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(50)
    assert peak(500) < peak(50) + 200_000


if HAS_ROW_LOCKS:

    def test_i12_locked_and_finished_rows_are_told_apart() -> None:
        locked, finished, free = parcels(3)

        def finish_another(row: Parcel) -> None:
            assert row.pk == free.pk
            Parcel.objects.using("other").filter(pk=finished.pk).update(sent=True)

        pending = Parcel.objects.filter(sent=False).order_by("-pk")
        with another_session_holds(locked.pk):
            report = processor(finish_another, pending=pending)(wait_for_locked=0)
        assert_run(report, processed=1, skipped=1, stale=1, passes=1)

    def test_i12_only_locked_rows_are_tried_again(clock: Clock) -> None:
        locked, failing, *_ = parcels(4)
        calls: list[int] = []

        def handle(row: Parcel) -> None:
            calls.append(row.pk)
            if row.pk == failing.pk:
                raise ValueError

        with another_session_holds(locked.pk):
            report = processor(handle)(wait_for_locked=5, stop=Waits(clock))
        assert report.passes > 1
        assert_run(report, processed=2, failed=1, skipped=1)
        assert len(calls) == 3

    def test_i6_waiting_for_locked_rows_never_outlasts_the_timeout(clock: Clock) -> None:
        locked, *_ = parcels(2)
        with another_session_holds(locked.pk):
            run, began = processor(ignore), clock.monotonic()
            report = run(wait_for_locked=40, timeout=20, stop=Waits(clock))
        assert_run(report, processed=1, skipped=1, stopped="timeout")
        assert clock.passed <= 20 <= clock.monotonic() - began

    def test_i6_no_more_than_a_bounded_number_of_locked_rows_is_remembered(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(source, "MOST_LOCKED", 2)
        rows = parcels(5)
        with ExitStack() as locks:
            for row in rows[:4]:  # one by one: a range would lock the row behind it too on MariaDB
                locks.enter_context(part_locked(Parcel, row.pk))
            report = processor(ignore)(wait_for_locked=0.1)
        assert_run(report, processed=1, skipped=4)
