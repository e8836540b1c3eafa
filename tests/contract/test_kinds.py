"""Kinds of fault that users of other projects have reported, with an example of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from threading import Event
from typing import Any

import pytest
import time_machine
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection
from django.db.backends.utils import CursorWrapper
from django.db.models import F, Value
from django.db.models.expressions import RawSQL
from django.test.utils import CaptureQueriesContext
from freezegun import freeze_time

from dcl_processor import Retry
from dcl_processor.exceptions import InsideTransaction, InvalidDone
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import part_locked
from tests.contract.support.temporary import at_update, temporary
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True)

IS_POSTGRESQL = connection.vendor == "postgresql"

#: A flip that no other statement writes.
IN_ORDER = the.PENDING.order_by("pk")
FLIP = {"done": True, "result": "done"}


#: What a user's test may have stopped the time with.
STOPPED = {
    "freezegun": lambda: freeze_time("2050-01-01"),
    "time-machine": lambda: time_machine.travel("2050-01-01", tick=False),
}
stopped = pytest.mark.parametrize("stop", STOPPED.values(), ids=STOPPED)


if HAS_ROW_LOCKS:

    @stopped
    def test_i24_a_wait_ends_although_the_time_stands_still(stop: Callable[[], Any]) -> None:
        """A row that another session has locked."""
        [row, _] = the.errands(2)
        with part_locked(Errand, row.pk), stop():
            assert_run(the.transactional(the.ignore)(wait_for_locked=0.2), processed=1, skipped=1)


@pytest.mark.parametrize("wrote", [True, False])
def test_i20_a_transaction_that_the_caller_began_is_the_callers(wrote: bool) -> None:
    the.errands(2)
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        if wrote:
            cursor.execute("UPDATE tests_errand SET result = 'mine'")
        with pytest.raises(InsideTransaction, match="by a BEGIN of its own"):
            the.transactional(the.ignore)()
        cursor.execute("COMMIT")
    expected = ("mine" if wrote else "", False)
    assert set(Errand.objects.values_list("result", "done")) == {expected}


if IS_POSTGRESQL:

    @stopped
    def test_i24_a_call_of_wake_whose_time_stands_still_silences_no_later_one(
        stop: Callable[[], Any],
    ) -> None:
        run = the.transactional(the.ignore)
        with stop():
            run.wake()
        with CaptureQueriesContext(connection) as sent:
            run.wake()
        assert len(sent) == 1

    @pytest.mark.parametrize("batch_size", [1, 3])
    @the.all_deliveries
    def test_i13_a_trigger_with_a_mistake_in_one_branch_ends_no_run(
        make: the.Make, batch_size: int
    ) -> None:
        """Its error is that of a statement which is wrong for every row."""
        the.errands(5)
        calls: list[int] = []
        with at_update("NEW.place = 2", "PERFORM tests_no_such_function()"):
            report = make(lambda row: calls.append(row.place), batch_size=batch_size)()
        assert_run(report, processed=4, failed=1, redone=report.redone)
        assert {*calls} - {2} == {0, 1, 3, 4}

    @the.each_delivery
    def test_a_mark_that_a_trigger_drops_is_no_lock(make: the.Make) -> None:
        the.errands(3)
        with at_update("NEW.place = 1", "RETURN NULL"):
            assert_run(make(the.ignore)(wait_for_locked=0), processed=2, skipped=1)

    @pytest.mark.parametrize("batch_size", [1, 3])
    @the.each_delivery
    def test_a_row_that_a_trigger_moves_away_is_done(make: the.Make, batch_size: int) -> None:
        the.errands(4)
        archive = "DELETE FROM tests_errand WHERE id = NEW.id; RETURN NULL"
        with at_update("NEW.done", archive):
            assert_run(make(the.ignore, batch_size=batch_size)(), processed=4)
        assert not Errand.objects.exists()

    def test_i24_the_time_of_a_handler_ends_although_the_time_stands_still() -> None:
        the.errands(1)

        async def handle(row: Errand) -> None:
            await asyncio.Event().wait()

        with freeze_time("2050-01-01"):
            assert_run(the.at_least_once(handle, handler_timeout=0.1)(), failed=1)


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_i16_a_failure_whose_record_is_refused_is_logged(
    make: the.Make, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The dead letter does not fit its column, and PostgreSQL ends the transaction for that."""
    the.errands(3)
    calls: list[int] = []

    def fail(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 1:
            raise ValueError("no such place")

    run = make(
        fail, retry=Retry(2, backoff=0), failed={"code": None, "dead": None}, batch_size=batch_size
    )
    assert_run(run(), processed=2, failed=1, to_retry=1)
    assert_run(run(), failed=1)
    assert "could not be recorded" in caplog.text
    assert calls.count(1) == 2


@the.all_deliveries
def test_i14_a_dead_letter_that_cannot_be_written_is_refused_before_any_handler(
    make: the.Make,
) -> None:
    rows = the.errands(2)
    run = make(the.raising(AssertionError()), failed={"dead": True, "place": float("inf")})
    with pytest.raises(InvalidDone):
        run()
    assert all(the.untouched(row) for row in rows)


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
def test_i22_what_wraps_djangos_cursors_sees_each_flip(
    make: the.Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    the.errands(4)
    seen: list[str] = []
    execute = CursorWrapper.execute

    def look(self: Any, sql: Any, params: Any = None) -> Any:
        seen.append(sql)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", look)
    assert_run(make(the.ignore)(), processed=4)
    flips = "\n".join(seen).count("UPDATE")
    assert flips >= 4 + 1  # and the rehearsal


# --- rows that are handled outside a transaction


if IS_POSTGRESQL:

    def test_i13_a_row_that_no_attempt_is_left_for_ends_no_run() -> None:
        """Its lease has lapsed, and one more attempt cannot even be counted."""
        rows = the.errands(5, attempts=0)
        lapsed = datetime(2020, 1, 1, tzinfo=UTC)
        Errand.objects.filter(pk=rows[1].pk).update(attempts=2, leased_until=lapsed)
        run = the.at_least_once(
            the.ignore, retry=the.retry(max_attempts=2), failed={"dead": True}, batch_size=3
        )
        with temporary(
            "ALTER TABLE tests_errand ADD CONSTRAINT tests_most CHECK (attempts <= 2)",
            "ALTER TABLE tests_errand DROP CONSTRAINT tests_most",
        ):
            report = run()
        assert_run(report, processed=4, failed=1)
        # No handler was called for it, and the row is as it was.
        state = the.state(rows[1])
        assert (state["dead"], state["attempts"]) == (False, 2)

    @the.all_deliveries
    @pytest.mark.parametrize("code", ["AB001", "55000", "23514"])
    def test_i14_a_rehearsal_that_is_refused_with_any_code_costs_no_row_an_attempt(
        make: the.Make, code: str
    ) -> None:
        """The project's own rule asks for what the handler writes."""
        the.errands(3)

        def handle(row: Errand) -> None:
            Errand.objects.filter(pk=row.pk).update(result="tracked")

        refuse = f"RAISE EXCEPTION USING ERRCODE = '{code}'"
        with at_update("NEW.done AND NEW.result = ''", refuse):
            assert_run(make(handle)(), processed=3)

    @the.all_deliveries
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("place", [0, 4])
    def test_i13_a_row_with_a_value_that_the_driver_cannot_read_fails_alone(
        make: the.Make, batch_size: int, place: int
    ) -> None:
        """PostgreSQL has times that Python has not."""
        rows = the.errands(7)
        bad = Errand.objects.filter(pk=rows[place].pk)
        bad.update(next_attempt_at=RawSQL("'-infinity'::timestamptz", ()))
        calls: list[int] = []
        claim = {"claimed": True, "result": "at work"} if make is the.at_most_once else None
        run = make(lambda row: calls.append(row.place), batch_size=batch_size, claim=claim)
        assert_run(run(), processed=6, failed=1)
        assert sorted(calls) == [each for each in range(7) if each != place]
        bad.update(next_attempt_at=None)
        assert the.untouched(rows[place])

    @pytest.mark.parametrize("code", ["57014", "53100", "55P03"])
    def test_i17_work_that_is_done_is_settled_when_the_database_can(code: str) -> None:
        """It refuses the first two settlements: too slow, no room on the disk, locked."""
        the.errands(1)
        calls: list[int] = []
        run = the.at_least_once(
            lambda row: calls.append(row.place), retry=the.retry(), done=lambda _: FLIP
        )
        refuse = f"RAISE EXCEPTION USING ERRCODE = '{code}'"
        with at_update("NEW.result <> ''", refuse, times=2):
            assert_run(run(), processed=1)
        assert calls == [0]


if connection.vendor == "mysql":

    def test_i14_a_division_by_what_the_handler_writes_costs_no_row_an_attempt() -> None:
        the.errands(2)

        def handle(row: Errand) -> None:
            Errand.objects.filter(pk=row.pk).update(place=row.place + 1)

        flip = {"done": True, "place": Value(2) / F("place")}
        assert_run(the.transactional(handle, done=flip, retry=the.retry())(), processed=2)


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_i21_a_row_that_is_locked_at_its_settlement_keeps_no_other_waiting(
        batch_size: int,
    ) -> None:
        """Another session lets go of it when the other rows are done."""
        rows = the.errands(4)
        others = Errand.objects.filter(pk__in=[row.pk for row in rows[1:]])
        calls: list[int] = []
        with ExitStack() as locks:

            def handle(row: Errand) -> None:
                calls.append(row.place)
                if row.place == 0:
                    locks.enter_context(part_locked(Errand, row.pk))
                elif row.place == 3:
                    assert others.filter(done=True).count() == 2
                    locks.close()

            run = the.at_least_once(
                handle, retry=the.retry(), pending=IN_ORDER, batch_size=batch_size
            )
            assert_run(run(), processed=4)
        assert calls == [0, 1, 2, 3]
        assert Errand.objects.filter(done=True).count() == 4

    @the.each_delivery
    @pytest.mark.parametrize("is_async", [False, True], ids=["threads", "an event loop"])
    def test_i21_a_row_that_is_locked_keeps_none_beside_it_waiting(
        make: the.Make, is_async: bool
    ) -> None:
        """Another session lets go of it when the other rows are done."""
        rows = the.errands(4)
        others = Errand.objects.filter(pk__in=[row.pk for row in rows[1:]], done=True)
        is_locked = Event()
        with ExitStack() as locks:

            def handle(row: Errand) -> None:
                if row.place == 0:
                    locks.enter_context(part_locked(Errand, row.pk))
                    is_locked.set()

            async def handle_async(row: Errand) -> None:
                await sync_to_async(handle)(row)

            def let_go() -> None:
                until(lambda: is_locked.is_set() and others.count() == 3, "the other rows")
                locks.close()

            run = make(handle_async if is_async else handle)
            with the.meanwhile(let_go) as ended:
                assert_run(run(concurrency=2), processed=4)
        assert ended == [None]

    @the.each_delivery
    def test_i17_work_that_is_done_is_settled_although_an_error_ends_the_run(
        make: the.Make,
    ) -> None:
        """The row is free again only behind the error, as a server is that was restarted."""
        row, other = the.errands(2)
        has_raised = Event()
        with part_locked(Errand, other.pk), ExitStack() as locks:

            def pending() -> Any:
                if Errand.objects.filter(result="worked"):
                    has_raised.set()
                    raise OperationalError("the server is gone")
                return the.PENDING

            def handle(row: Errand) -> None:
                Errand.objects.filter(pk=row.pk).update(result="worked")
                locks.enter_context(part_locked(Errand, row.pk))

            def let_go() -> None:
                the.wait(has_raised)
                locks.close()

            with the.meanwhile(let_go), pytest.raises(OperationalError, match="is gone"):
                make(handle, pending=pending)()  # it asks again for the other row
        row.refresh_from_db()
        assert row.done

    def test_i21_a_stop_waits_for_no_row_that_is_locked_at_its_settlement() -> None:
        """The lock is kept until the run has ended."""
        the.errands(1)
        stop = Event()
        with ExitStack() as locks:

            def handle(row: Errand) -> None:
                locks.enter_context(part_locked(Errand, row.pk))
                stop.set()

            report = the.at_least_once(handle)(stop=stop)
        assert_run(report, failed=1)
        assert Errand.objects.filter(done=False, leased_until__isnull=False).count() == 1


def test_i15_the_handler_gets_what_the_queryset_gives() -> None:
    the.errands(2)
    plain = vars(the.PENDING.first()).keys()
    seen: list[Any] = []
    run = the.at_least_once(lambda row: seen.append((row.get_deferred_fields(), vars(row).keys())))
    assert_run(run(), processed=2)
    # A lease is renewed while the handler runs, and so no save() is to write it back.
    assert seen == [({"leased_until"}, plain - {"leased_until"})] * 2


def test_a_save_takes_no_row_back_that_another_worker_has() -> None:
    """The lease has lapsed, and the next worker has its own."""
    the.errands(1)
    theirs = datetime(2050, 1, 1, tzinfo=UTC)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(leased_until=theirs)
        row.result = "saved"
        row.save()

    assert_run(the.at_least_once(handle)(), lease_lost=1)
    assert Errand.objects.get().leased_until == theirs
