"""What ends a batch before its end, and leaves the rest of it as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dcl_processor.engine.run import Run
from dcl_processor.engine.source import Source
from dcl_processor.interrupts import Interruption
from dcl_processor.signals import row_finished
from tests.contract.support import errands as the
from tests.contract.support.batches import note, sent, worked
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.wanted import held
from tests.models import Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_i10_a_stop_leaves_the_rows_that_have_not_started_as_they_were() -> None:
    parcels(6)
    stop = threading.Event()

    def handle(row: Parcel) -> None:
        note(row)
        if row.priority == 2:
            stop.set()

    report = in_batches(handle)(stop=stop)
    assert_run(report, processed=3, stopped="signal")
    assert sent() == worked() == [0, 1, 2]


def test_a_limit_is_kept_within_a_batch() -> None:
    parcels(10)
    calls: list[int] = []
    report = in_batches(lambda row: calls.append(row.priority), batch_size=4)(limit=6)
    assert_run(report, processed=6, stopped="limit")
    assert calls == sent() == list(range(6))


def test_a_timeout_leaves_the_rest_of_the_batch_as_it_was(clock: Clock) -> None:
    parcels(4)

    def handle(row: Parcel) -> None:
        if row.priority == 1:
            clock.passed += HOUR

    report = in_batches(handle)(timeout=HOUR)
    assert_run(report, processed=2, stopped="timeout")
    assert sent() == [0, 1]


def test_i10_an_interrupt_rolls_the_whole_batch_back_and_ends_the_run() -> None:
    parcels(4)
    ran: list[int] = []

    def handle(row: Parcel) -> None:
        note(row)
        transaction.on_commit(lambda: ran.append(row.priority))
        if row.priority == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_batches(handle)()
    assert (sent(), worked(), ran) == ([], [], [])
    assert not connection.in_atomic_block
    assert "_cursor" not in vars(connection)
    assert connection.execute_wrappers == []
    assert_run(in_batches(note)(), processed=4)


def test_so_many_failures_in_a_row_end_a_batch_before_its_end() -> None:
    parcels(20)
    calls: list[int] = []

    def handle(row: Parcel) -> None:
        calls.append(row.priority)
        if row.priority > 4:
            raise ConnectionError

    report = in_batches(handle, max_consecutive_failures=3, batch_size=10)()
    assert_run(report, processed=5, failed=3, stopped="failures")
    assert calls == list(range(8))
    assert sent() == [0, 1, 2, 3, 4]


def test_failures_in_a_row_are_counted_across_batches_and_a_success_ends_the_count() -> None:
    parcels(20)
    good = {0, 3, 6}

    def handle(row: Parcel) -> None:
        if row.priority not in good:
            raise ConnectionError

    report = in_batches(handle, max_consecutive_failures=4, batch_size=2)()
    assert_run(report, processed=3, failed=8, stopped="failures")


class Releasing(threading.Event):
    """Lets go of what others have locked when the run waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def wait(self, timeout: float | None = None) -> bool:
        connections["other"].rollback()
        return False

    def is_set(self) -> bool:
        self.asked += 1
        assert self.asked < 1000, "expected the run to end, and it asks on"
        return super().is_set()


if connection.features.has_select_for_update:

    @pytest.mark.parametrize("limit", [None, 1])
    def test_what_ends_a_later_pass_leaves_the_rows_behind_as_they_were(limit: int | None) -> None:
        parcels(3)
        stop = Releasing()
        calls: list[int] = []

        def handle(row: Parcel) -> None:
            calls.append(row.priority)
            if limit is None:
                stop.set()

        connections["other"].set_autocommit(False)
        try:
            rows = Parcel.objects.using("other").select_for_update()
            for row in Parcel.objects.order_by("pk"):
                rows.get(pk=row.pk)  # one by one: a range would lock what is between on MariaDB
            report = in_batches(handle, batch_size=1)(stop=stop, limit=limit)
        finally:
            connections["other"].rollback()
            connections["other"].set_autocommit(True)
        assert_run(
            report, processed=1, skipped=2, passes=2, stopped="signal" if limit is None else "limit"
        )
        assert calls == sent() == [0]


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("make", [the.at_most_once, the.at_least_once])
def test_an_interrupted_run_reports_the_rows_of_its_last_batch_that_were_settled(
    make: the.Make, concurrency: int
) -> None:
    rows = the.errands(5)
    told: list[Any] = []

    def handle(row: Errand) -> None:
        if row.place == 2:
            raise Interruption

    def listen(pk: Any, **_: Any) -> None:
        told.append(pk)

    row_finished.connect(listen)
    try:
        with pytest.raises(Interruption) as interrupted:
            make(handle, batch_size=5)(concurrency=concurrency)
    finally:
        row_finished.disconnect(listen)
    assert [the.state(row)["done"] for row in rows] == [True, True, False, False, False]
    report = interrupted.value.report  # type: ignore[attr-defined]  # as documented
    assert_run(report, processed=2, stopped="signal")
    assert told == [row.pk for row in rows[:2]]


def test_an_interrupted_transaction_reports_none_of_its_rows() -> None:
    parcels(3)

    def handle(row: Parcel) -> None:
        if row.priority == 2:
            raise Interruption

    with pytest.raises(Interruption) as interrupted:
        in_batches(handle)()
    assert sent() == []
    report = interrupted.value.report  # type: ignore[attr-defined]  # as documented
    assert_run(report, stopped="signal")


if connection.features.has_select_for_update:

    def test_a_success_after_the_last_failure_does_not_change_why_the_run_stopped(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A slow handler goes on while failures end the run, and one row is locked all the time."""
        parcels(8)
        stopped = threading.Event()
        real = Run.must_stop

        def must_stop(run: Run) -> bool:
            if real(run):
                stopped.set()
            return run.stopped is not None

        monkeypatch.setattr(Run, "must_stop", must_stop)

        def handle(row: Parcel) -> None:
            if row.priority:
                raise ValueError(row.priority)
            assert stopped.wait(30)

        run = in_batches(handle, batch_size=1, max_consecutive_failures=3, strict_order=True)
        with held([Parcel.objects.get(priority=1)]):
            report = run(concurrency=2, wait_for_locked=0)
        assert_run(report, processed=1, failed=3, skipped=1, stopped="failures")

    def test_a_success_that_was_under_way_makes_probes_unnecessary(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Failures make the run try rows at random places; this success is counted just before."""
        parcels(6)
        probing = threading.Event()
        real = Source._next_step

        def next_step(source: Source, **options: Any) -> Any:
            if source._run.counters.streak.to_probe:
                probing.set()
            return real(source, **options)

        monkeypatch.setattr(Source, "_next_step", next_step)

        def handle(row: Parcel) -> None:
            if row.priority:
                raise ValueError(row.priority)
            assert probing.wait(30)

        report = in_batches(handle, batch_size=1, max_consecutive_failures=4)(concurrency=2)
        assert probing.is_set()
        assert_run(report, processed=1, failed=5)
