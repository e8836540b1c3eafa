"""The lease: who may have a row when, and what keeps it so."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from dcl_processor import Lease, Report
from dcl_processor.engine.heartbeat import Heartbeat
from tests.contract.support import errands as the
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


def test_a_lapsed_lease_is_taken_over_by_whoever_comes_next() -> None:
    [row] = the.errands(1)
    run = the.at_least_once(the.ignore)
    Errand.objects.update(leased_until=timezone.now() + timedelta(days=1))
    assert_run(run(wait_for_locked=0))
    lapse(row)
    assert_run(run(), processed=1)


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


def test_a_heartbeat_keeps_the_lease_for_longer_than_its_duration() -> None:
    [row] = the.errands(1)
    reports: list[Report] = []
    second = the.at_least_once(the.ignore, lease=SHORT)

    def handle(row: Errand) -> None:
        first = leased_until(row)
        until(lambda: leased_until(row) > first + timedelta(seconds=4.5))
        reports.append(the.elsewhere(lambda: second(wait_for_locked=0)))

    reports.append(the.at_least_once(handle, lease=Lease(4))())
    during, after = reports
    assert_run(during)
    assert_run(after, processed=1)
    assert the.state(row)["leased_until"] is False


def test_leases_are_renewed_at_a_third_of_their_duration() -> None:
    [_row] = the.errands(1)
    tokens: list[Any] = []

    def handle(row: Errand) -> None:
        def four_of_them() -> bool:
            token = leased_until(row)
            if token not in tokens:
                tokens.append(token)
            return len(tokens) == 4

        until(four_of_them)

    assert_run(the.at_least_once(handle, lease=Lease(1.5))(), processed=1)
    pauses = [(b - a).total_seconds() for a, b in itertools.pairwise(tokens)]
    # On a busy machine they are longer.
    assert all(pause >= 0.4 for pause in pauses)


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


def test_a_handler_may_save_the_row_after_a_renewal() -> None:
    """It writes back the lease that its instance says; the row is ours all the same."""
    [row] = the.errands(1)

    def handle(row: Errand) -> str:
        first = row.leased_until
        assert first is not None
        until(lambda: leased_until(row) > first + timedelta(seconds=1))
        row.save()
        return "saved"

    report = the.at_least_once(handle, lease=SHORT, done=with_result)()
    assert_run(report, processed=1)
    assert the.state(row)["result"] == "saved"


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


def test_a_row_whose_lease_lapsed_before_its_handler_was_not_tried() -> None:
    the.errands(3)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 0:
            monkeypatched.setattr(Heartbeat, "is_ours", lambda self, pk: False)

    with pytest.MonkeyPatch.context() as monkeypatched:
        report = the.at_least_once(handle, batch_size=3)(limit=2)
    assert calls == [0]
    assert_run(report, processed=1, lease_lost=2)


def loses_its_lease(calls: list[int]) -> Callable[[Errand], None]:
    def handle(row: Errand) -> None:
        calls.append(row.place)
        later = F("leased_until") + timedelta(hours=1)
        Errand.objects.filter(pk=row.pk).update(leased_until=later)

    return handle
