"""The lease: who may have a row when, and what keeps it so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.backends.signals import connection_created
from django.db.models import F
from django.utils import timezone

from dcl_processor import Lease, Report
from dcl_processor.engine import heartbeat, lane
from tests.contract.support import errands as the
from tests.contract.support.clocks import Clock
from tests.contract.support.heartbeat import (
    HAS_ROW_LOCKS,
    begins_to_write,
    held_beat,
    until,
    writes,
)
from tests.contract.support.messages import updates
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement, end_session
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SHORT = Lease(1.5)


def leased_until(row: Errand) -> Any:
    return Errand.objects.using("other").values_list("leased_until", flat=True).get(pk=row.pk)


def lapse(row: Errand) -> None:
    """Let the lease lapse, as it does when its copy is cut off from the database for too long."""
    ago = timezone.now() - timedelta(days=1)
    Errand.objects.using("other").filter(pk=row.pk).update(leased_until=ago)


def is_settlement(sql: str) -> bool:
    return updates(sql) and "leased_until" in sql and "result" in sql


def with_result(row: Errand, result: Any) -> dict[str, Any]:
    return {"done": True, "result": str(result)}


@pytest.mark.parametrize("fails", [False, True], ids=["handled", "failed"])
def test_a_lease_that_was_lost_in_the_work_settles_nothing(fails: bool) -> None:
    """Two handlers have run, one has settled, the other says that it lost the lease."""
    [row] = the.errands(1)
    reports: list[Report] = []
    settled: dict[str, Any] = {}
    second = the.at_least_once(lambda row: "second", done=with_result, retry=the.retry())

    def handle(row: Errand) -> str:
        lapse(row)
        reports.append(the.elsewhere(second))
        settled.update(Errand.objects.using("other").values().get())
        if fails:
            raise ValueError
        return "first"

    run = the.at_least_once(handle, done=with_result, retry=the.retry(), failed={"dead": True})
    reports.insert(0, run())
    before, after = reports
    assert_run(before, lease_lost=1)
    assert_run(after, processed=1)
    assert Errand.objects.values().get(pk=row.pk) == settled
    assert settled["result"] == "second"
    assert settled["attempts"] == 0


def test_a_lease_that_another_copy_holds_is_not_settled_either() -> None:
    """The second handler is at work when the first one ends."""
    [row] = the.errands(1)
    begun, go_on = Event(), Event()

    def second(row: Errand) -> str:
        begun.set()
        the.wait(go_on)
        return "second"

    other = the.at_least_once(second, done=with_result)
    results: list[Any] = []

    def first(row: Errand) -> str:
        lapse(row)
        block.enter_context(the.meanwhile(other))
        the.wait(begun)
        return "first"

    with ExitStack() as block:
        report = the.at_least_once(first, done=with_result)()
        results.append((report.processed, report.lease_lost, the.state(row)["leased_until"]))
        go_on.set()
    assert results == [(0, 1, True)]
    said = the.state(row)
    assert (said["result"], said["leased_until"]) == ("second", False)


def test_nothing_new_starts_on_a_row_whose_lease_was_lost() -> None:
    """The heartbeat finds out while the row before it is handled."""
    rows = the.errands(3)
    handled: list[Any] = []

    def handle(row: Errand) -> None:
        handled.append(row.pk)
        if row.pk == rows[0].pk:
            before = leased_until(rows[2])
            taken = timezone.now() + timedelta(days=1)
            Errand.objects.using("other").filter(pk=rows[1].pk).update(leased_until=taken)
            until(lambda: leased_until(rows[2]) > before)
            # What the first beat found out is noted before the second one writes.
            once = leased_until(rows[2])
            until(lambda: leased_until(rows[2]) > once)

    report = the.at_least_once(handle, lease=SHORT, batch_size=3, retry=the.retry())()
    assert handled == [rows[0].pk, rows[2].pk]
    assert_run(report, processed=2, lease_lost=1)
    assert the.state(rows[1])["leased_until"]


def test_a_lease_that_lapsed_unnoticed_by_others_costs_the_row_no_attempt() -> None:
    """No worker took it, and its handler was not called."""
    rows = the.errands(2)

    def handle(row: Errand) -> None:
        # Inside TestCase there is no heartbeat.
        if row.pk == rows[0].pk:
            Event().wait(SHORT.seconds + 0.1)

    block = transaction.atomic()
    block._from_testcase = True  # type: ignore[attr-defined]  # Django's own mark
    with block:
        report = the.at_least_once(handle, lease=SHORT, batch_size=2, retry=the.retry())()
    assert_run(report, processed=1, lease_lost=1)
    assert the.untouched(rows[1])


def test_a_renewal_between_the_handler_and_the_settlement_does_no_harm() -> None:
    """Held until the settlement is about to be sent, and then committed before it."""
    [row] = the.errands(1)
    with held_beat(writes) as beat:

        def renew_now() -> None:
            before = leased_until(row)
            beat.go.set()
            until(lambda: leased_until(row) > before)

        def handle(row: Errand) -> str:
            beat.await_it()
            return "done"

        run = the.at_least_once(handle, lease=SHORT, done=with_result)
        with before_statement(is_settlement, renew_now):
            report = run()
    assert_run(report, processed=1)
    said = the.state(row)
    assert (said["result"], said["leased_until"]) == ("done", False)


def test_a_renewal_that_comes_after_the_settlement_writes_nothing(beats_soon: None) -> None:
    """Held after it has looked which leases are held, until the row is settled."""
    rows = the.errands(2)
    settled: list[Any] = []
    with held_beat(begins_to_write) as beat:

        def handle(row: Errand) -> str:
            if row.pk == rows[0].pk:
                beat.await_it()
                return "first"
            settled.append(the.state(rows[0]))
            before = leased_until(row)
            beat.go.set()
            until(lambda: leased_until(row) > before)
            return "second"

        run = the.at_least_once(handle, lease=Lease(60), done=with_result, batch_size=2)
        report = run()
    assert_run(report, processed=2)
    assert settled[0]["leased_until"] is False
    assert [the.state(row)["leased_until"] for row in rows] == [False, False]


def test_a_settlement_does_not_wait_for_a_heartbeat_that_hangs(beats_soon: None) -> None:
    """Its connection may be dead, and nothing says so for minutes."""
    rows = the.errands(2)
    with held_beat(lambda sql: sql.startswith("SELECT")) as beat:

        def handle(row: Errand) -> None:
            if row.pk == rows[0].pk:
                beat.await_it()
            else:
                assert the.state(rows[0])["done"]
                beat.go.set()

        report = the.at_least_once(handle, lease=Lease(60), batch_size=2)()
    assert_run(report, processed=2)


def test_a_handler_that_deletes_its_row_does_not_stop_the_heartbeat() -> None:
    rows = the.errands(2)

    def handle(row: Errand) -> None:
        if row.pk == rows[0].pk:
            before = leased_until(rows[1])
            Errand.objects.filter(pk=row.pk).delete()
            until(lambda: leased_until(rows[1]) > before)
            until(lambda: leased_until(rows[1]) > before + timedelta(seconds=0.5))

    report = the.at_least_once(handle, lease=SHORT, batch_size=2)()
    assert_run(report, processed=2)


def test_no_thread_and_no_session_is_left_behind() -> None:
    the.errands(3)
    during: list[Any] = []

    def handle(row: Errand) -> None:
        first = leased_until(row)
        until(lambda: leased_until(row) > first)
        during.append((the.our_threads(), the.sessions()))

    leased_until(Errand.objects.latest("pk"))  # connects
    before = the.sessions()
    report = the.at_least_once(handle, lease=SHORT)()
    assert_run(report, processed=3)
    assert [len(threads) for threads, _ in during] == [1, 1, 1]
    assert the.our_threads() == []
    if before:
        assert [len(sessions - before) for _, sessions in during] == [1, 1, 1]
        until(lambda: the.sessions() <= before)


def test_nothing_pending_starts_no_heartbeat() -> None:
    before = the.sessions()
    with held_beat(lambda sql: True) as beat:
        assert_run(the.at_least_once(the.ignore, lease=SHORT)())
    assert (the.our_threads(), beat.sent, the.sessions() - before) == ([], [], set())


if HAS_ROW_LOCKS:

    def test_a_row_that_its_handler_locks_keeps_no_other_lease_from_renewal() -> None:
        rows = the.errands(2)

        def handle(row: Errand) -> None:
            if row.pk != rows[0].pk:
                return
            before = leased_until(rows[1])
            with transaction.atomic():
                list(Errand.objects.filter(pk=row.pk).select_for_update())
                until(lambda: leased_until(rows[1]) > before + timedelta(seconds=1))

        report = the.at_least_once(handle, lease=SHORT, batch_size=2)()
        assert_run(report, processed=2)

    def test_a_heartbeat_whose_session_ended_connects_anew(
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        [_row] = the.errands(1)

        def handle(row: Errand) -> None:
            before = leased_until(row)
            beat.await_it()
            beat.go.set()
            until(lambda: leased_until(row) > before + timedelta(seconds=1))

        with (
            held_beat(begins_to_write, first=end_session) as beat,
            caplog.at_level(logging.WARNING),
        ):
            report = the.at_least_once(handle, lease=Lease(2))()
        assert_run(report, processed=1)
        assert "the heartbeat did not renew the leases" in caplog.text
        assert the.our_threads() == []

    def test_a_settlement_whose_answer_was_lost_is_not_taken_for_a_lost_lease() -> None:
        """It was committed; the session ends before its answer comes."""
        [row] = the.errands(1)
        lost: list[str] = []

        def lose(execute: Any, sql: str, *args: Any) -> Any:
            answer = execute(sql, *args)
            if is_settlement(sql) and not lost:
                lost.append(sql)
                end_session()
                execute("SELECT 1", None, False, {"connection": connection})
            return answer

        with connection.execute_wrapper(lose):
            report = the.at_least_once(
                lambda row: "done", done={"done": True, "result": "settled"}
            )()
        assert len(lost) == 1
        assert_run(report, processed=1)
        said = the.state(row)
        assert (said["done"], said["result"], said["leased_until"]) == (True, "settled", False)


def test_a_limit_counts_the_calls_whose_leases_were_lost() -> None:
    the.errands(10)
    calls: list[int] = []
    report = the.at_least_once(loses_its_lease(calls))(limit=2)
    assert len(calls) == 2
    assert_run(report, lease_lost=2, stopped="limit")


@pytest.mark.parametrize("size", [1, 10])
def test_lost_leases_are_failures_one_after_the_other(size: int) -> None:
    the.errands(10)
    calls: list[int] = []
    handle = loses_its_lease(calls)
    report = the.at_least_once(handle, max_consecutive_failures=3, batch_size=size)()
    assert len(calls) == 3
    assert_run(report, lease_lost=3, stopped="failures")


def loses_its_lease(calls: list[int]) -> Callable[[Errand], None]:
    def handle(row: Errand) -> None:
        calls.append(row.place)
        later = F("leased_until") + timedelta(hours=1)
        Errand.objects.filter(pk=row.pk).update(leased_until=later)

    return handle


# --- when leases are renewed, of which rows, and from when on they live


MINUTE = Lease(60)
#: No other number in a statement is one of these keys.
KEYS = (71_001, 71_002, 71_003)


class Pauses(list[float | None]):
    """What the heartbeat waits for; ``endless``: from now on until the end of the run."""

    endless = False


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Note what the heartbeat waits for, and let it come at once."""
    noted = Pauses()

    class Soon(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            noted.append(timeout)
            return super().wait(60 if noted.endless else 0.01)

    monkeypatch.setattr(
        heartbeat, "threading", SimpleNamespace(**{**vars(threading), "Event": Soon})
    )
    return noted


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let claims and heartbeats go by a clock that the test puts forward."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    monkeypatch.setattr(lane, "time", clock)
    return clock


def test_leases_are_renewed_at_a_third_of_their_duration(pauses: list[float | None]) -> None:
    the.errands(1)
    report = the.at_least_once(lambda row: until(lambda: len(pauses) > 3), lease=MINUTE)()
    assert_run(report, processed=1)
    # A later beat may find the row locked by its settlement.
    assert set(pauses[:4]) == {20.0}


def test_a_renewal_that_failed_is_tried_again_after_a_twelfth(pauses: list[float | None]) -> None:
    the.errands(1)
    failed: list[Any] = []

    def fail_once(beating: Any) -> None:
        if not failed:
            failed.append(beating)
            raise OperationalError("no answer")

    with held_beat(lambda sql: True, first=fail_once) as beat:
        beat.go.set()
        report = the.at_least_once(lambda row: until(lambda: len(pauses) > 3), lease=MINUTE)()
    assert_run(report, processed=1)
    assert pauses[:3] == [20.0, 5.0, 20.0]


@contextmanager
def noted(pauses: list[float | None]) -> Iterator[list[tuple[int, str]]]:
    """Note the parameters of the heartbeats, each with the number of the pause before it."""
    said: list[tuple[int, str]] = []

    def wrapper(execute: Any, sql: str, params: Any, *args: Any) -> Any:
        said.append((len(pauses), repr(params)))
        return execute(sql, params, *args)

    def watch(connection: Any, **_: Any) -> None:
        if threading.current_thread().name.endswith(": leases"):
            connection.execute_wrappers.append(wrapper)

    connection_created.connect(watch)
    try:
        yield said
    finally:
        connection_created.disconnect(watch)


def test_rows_that_are_settled_are_renewed_no_more(pauses: list[float | None]) -> None:
    Errand.objects.bulk_create([Errand(pk=key, place=n) for n, key in enumerate(KEYS)])
    settled_before: list[int] = []

    def handle(row: Errand) -> None:
        if row.pk == KEYS[-1]:
            settled_before.append(len(pauses))
            until(lambda: len(pauses) > settled_before[0] + 3)

    with noted(pauses) as said:
        report = the.at_least_once(handle, lease=MINUTE, batch_size=3)()
    assert_run(report, processed=3)
    # One may have been under way while the second row was settled.
    after = [params for beat, params in said if beat > settled_before[0] + 1]
    assert any(str(KEYS[-1]) in params for params in after)
    assert not any(str(key) in params for params in after for key in KEYS[:-1])


def test_a_lease_lives_from_the_beginning_of_its_claim(time: Clock) -> None:
    """Its time is written by a statement that may take longer than the lease."""
    [row] = the.errands(1)
    calls: list[Any] = []

    def slowly(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and not time.passed:
            time.passed = 61.0
        return execute(sql, *args)

    run = the.at_least_once(lambda row: calls.append(row.pk), lease=MINUTE)
    with connection.execute_wrapper(slowly):
        report = run()
    assert_run(report, lease_lost=1)
    assert calls == []
    assert the.untouched(row)


def test_a_lease_lives_from_the_beginning_of_its_renewal(time: Clock, pauses: Pauses) -> None:
    first, second = the.errands(2)
    calls: list[Any] = []

    with held_beat(writes) as beat:

        def handle(row: Errand) -> None:
            calls.append(row.pk)
            beat.await_it()
            time.passed = 61.0
            under_way = len(pauses)
            pauses.endless = True  # the next one would renew the lease again
            beat.go.set()
            until(lambda: len(pauses) > under_way)

        report = the.at_least_once(handle, lease=MINUTE, batch_size=2)()
    assert_run(report, processed=1, lease_lost=1)
    assert calls == [first.pk]
    assert the.untouched(second)
