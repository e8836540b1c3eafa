"""AT_LEAST_ONCE: leased and committed before the work, settled if the lease is still held."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from dcl_processor import Discard, Lease, Report, Snooze
from dcl_processor.exceptions import AttemptsUsedUp, StillPending
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.gate import HAS_GATE, run_and_meanwhile
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

QUESTIONS = {
    "own": lambda: the.PENDING,
    "spanning": lambda: the.PENDING.filter(pk__in=Errand.objects.filter(done=False).values("pk")),
}
each_question = pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
each_size = pytest.mark.parametrize("size", [1, 3])


@each_question
@each_size
def test_lease_and_attempt_are_committed_before_the_handler(question: Any, size: int) -> None:
    rows = the.errands(5)
    seen: list[Any] = []

    def look(row: Errand) -> None:
        assert not connection.in_atomic_block
        other = Errand.objects.using("other").get(pk=row.pk)
        assert (row.attempts, row.leased_until) == (other.attempts, other.leased_until)
        seen.append((other.attempts, other.leased_until is not None, other.done))

    run = the.at_least_once(look, pending=question, batch_size=size, retry=the.retry())
    report = run()
    assert_run(report, processed=5)
    assert seen == [(1, True, False)] * 5
    expected = {**the.state(rows[0]), "done": True, "attempts": 0, "leased_until": False}
    assert [the.state(row) for row in rows] == [expected] * 5


if HAS_GATE:

    @pytest.mark.parametrize("make", [the.at_least_once, the.at_most_once])
    def test_the_session_is_idle_while_the_handler_works(make: Any) -> None:
        the.errands(2)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            session = cursor.fetchone()[0]
        states: list[str] = []

        def look(row: Errand) -> None:
            with connections["other"].cursor() as cursor:
                cursor.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [session])
                states.append(cursor.fetchone()[0])

        assert_run(make(look)(), processed=2)
        assert states == ["idle", "idle"]

    def test_a_later_batch_is_leased_in_one_statement() -> None:
        the.errands(9)
        sent: list[int] = []

        def handle(row: Errand) -> None:
            sent.append(len(queries.captured_queries))

        run = the.at_least_once(handle, batch_size=3, retry=the.retry())
        with CaptureQueriesContext(connection) as queries:
            assert_run(run(), processed=9)
        # The last settlement of one batch, and the claim of the next.
        assert sent[3] - sent[2] == 2
        assert "RETURNING" in queries.captured_queries[sent[3] - 1]["sql"]


@each_question
@each_size
@pytest.mark.parametrize("at", [0, 1], ids=["first batch", "later batch"])
def test_racing_copies_call_one_handler_for_each_row(question: Any, size: int, at: int) -> None:
    """The second copy runs in full between the first one's snapshot and its lock."""
    rows = the.errands(6)
    handled: list[Any] = []

    def run(using: str) -> Report:
        copy = the.at_least_once(
            lambda row: handled.append(row.pk), pending=question, using=using, batch_size=size
        )
        return copy()

    reports: list[Report] = []
    first = run_and_meanwhile(lambda: run("default"), lambda: reports.append(run("other")), at=at)
    reports.append(first)
    assert sorted(handled) == [row.pk for row in rows]
    assert sum(report.processed for report in reports) == 6
    assert not any(report.failed or report.lease_lost for report in reports)


@each_question
def test_a_copy_that_comes_during_the_work_leaves_the_row_alone(question: Any) -> None:
    [row] = the.errands(1)
    reports: list[Report] = []
    second = the.at_least_once(the.ignore, pending=question)

    def handle(row: Errand) -> None:
        reports.append(the.elsewhere(lambda: second(wait_for_locked=0)))

    reports.append(the.at_least_once(handle, pending=question)())
    during, after = reports
    assert_run(during)
    assert_run(after, processed=1)
    assert the.state(row)["done"]


def test_a_failure_is_noted_and_frees_the_lease() -> None:
    [row] = the.errands(1)

    def fail(row: Errand) -> None:
        raise ValueError("no such place")

    run = the.at_least_once(fail, retry=the.retry(), failed={"dead": True})
    for attempt in (1, 2, 3):
        assert_run(run(), failed=1, retried=int(attempt < 3))
        said = the.state(row)
        assert (said["attempts"], said["leased_until"], said["dead"]) == (
            attempt,
            False,
            attempt == 3,
        )
    assert Errand.objects.get().last_error == "ValueError: no such place"
    assert_run(run())


def test_a_failed_row_waits_for_its_backoff() -> None:
    the.errands(1)
    calls: list[Any] = []

    def fail(row: Errand) -> None:
        calls.append(row.pk)
        raise ValueError

    run = the.at_least_once(fail, retry=the.retry(backoff=3600))
    run()
    run()
    assert len(calls) == 1
    Errand.objects.update(next_attempt_at=timezone.now() - timedelta(days=1))
    run()
    assert len(calls) == 2


def test_without_retry_a_failed_row_is_free_for_the_next_run() -> None:
    [row] = the.errands(1)
    calls: list[Any] = []

    def fail_once(row: Errand) -> None:
        calls.append(row.pk)
        if len(calls) == 1:
            raise ValueError

    run = the.at_least_once(fail_once)
    assert_run(run(), failed=1)
    assert the.untouched(row)
    assert_run(run(), processed=1)


def test_rows_whose_process_died_are_given_up_and_the_others_get_done() -> None:
    """As a killed process leaves them: attempts counted, and a lease that has lapsed."""
    rows = the.errands(4)
    lapsed = timezone.now() - timedelta(days=1)
    dying = Errand.objects.filter(pk__in=[rows[0].pk, rows[2].pk])
    dying.update(attempts=3, leased_until=lapsed)
    handled: list[Any] = []
    run = the.at_least_once(
        lambda row: handled.append(row.pk), retry=the.retry(), failed={"dead": True}, batch_size=2
    )
    report = run()
    assert_run(report, processed=2, failed=2)
    assert handled == [rows[1].pk, rows[3].pk]
    assert all(isinstance(failure.error, AttemptsUsedUp) for failure in report.failures)
    said = the.state(rows[0])
    assert (said["dead"], said["attempts"], said["leased_until"]) == (True, 3, False)
    assert_run(run())


def test_without_failed_rows_whose_process_died_are_left_alone() -> None:
    rows = the.errands(2)
    Errand.objects.filter(pk=rows[0].pk).update(attempts=3)
    handled: list[Any] = []
    run = the.at_least_once(lambda row: handled.append(row.pk), retry=the.retry())
    assert_run(run(), processed=1)
    assert handled == [rows[1].pk]


def test_a_row_whose_process_died_once_is_tried_again() -> None:
    [row] = the.errands(1, attempts=1, leased_until=timezone.now() - timedelta(days=1))
    seen: list[int] = []
    run = the.at_least_once(lambda row: seen.append(row.attempts), retry=the.retry())
    assert_run(run(), processed=1)
    assert seen == [2]
    assert the.state(row)["attempts"] == 0


def test_snooze_costs_no_attempt_and_frees_the_lease() -> None:
    [row] = the.errands(1)

    def snooze(row: Errand) -> None:
        raise Snooze("closed", delay=3600)

    run = the.at_least_once(snooze, retry=the.retry())
    assert_run(run(), snoozed=1)
    assert the.untouched(row)
    assert_run(run())


def test_discard_writes_failed() -> None:
    [row] = the.errands(1)

    def discard(row: Errand) -> None:
        raise Discard("no such place")

    assert_run(the.at_least_once(discard, failed={"dead": True})(), discarded=1)
    said = the.state(row)
    assert (said["dead"], said["leased_until"]) == (True, False)


@pytest.mark.parametrize("make", [the.at_least_once, the.at_most_once])
@pytest.mark.parametrize("size", [1, 3])
def test_a_column_that_the_question_leaves_out_stays_out_of_every_instance(
    make: Any, size: int
) -> None:
    """The mark's own included: a save() by the handler is not to write them."""
    the.errands(7)
    loaded: list[set[str]] = []

    def look(row: Errand) -> None:
        loaded.append(vars(row).keys() & {field.attname for field in Errand._meta.fields})

    assert_run(
        make(look, pending=the.PENDING.only("place", "done"), batch_size=size)(), processed=7
    )
    assert loaded == [{"id", "place", "done"}] * 7


def test_the_result_is_written_with_the_flip() -> None:
    [row] = the.errands(1)
    run = the.at_least_once(
        lambda row: f"number {row.place}",
        done=lambda row, result: {"done": True, "result": result},
    )
    assert_run(run(), processed=1)
    assert the.state(row)["result"] == "number 0"


@pytest.mark.parametrize("retrying", [False, True], ids=["no retry", "retry"])
def test_a_result_dependent_flip_that_leaves_the_row_pending_is_told(retrying: bool) -> None:
    """The flip is taken back, the lease is freed: it will not be pending for a lease's time."""
    [row] = the.errands(1)
    options: dict[str, Any] = {"retry": the.retry()} if retrying else {}
    run = the.at_least_once(
        lambda row: "no", done=lambda row, result: {"result": result}, **options
    )
    report = run()
    assert_run(report, failed=1, retried=int(retrying))
    assert isinstance(report.failures[0].error, StillPending)
    said = the.state(row)
    assert (said["result"], said["leased_until"], said["attempts"]) == ("", False, int(retrying))


@pytest.mark.parametrize("retrying", [False, True], ids=["no retry", "retry"])
def test_a_flip_that_the_database_refuses_is_the_rows_failure(retrying: bool) -> None:
    rows = the.errands(2)
    Errand.objects.filter(pk=rows[0].pk).update(done=True, code="same")
    options: dict[str, Any] = {"retry": the.retry()} if retrying else {}
    run = the.at_least_once(
        the.ignore, done=lambda row, result: {"done": True, "code": "same"}, **options
    )
    assert_run(run(), failed=1, retried=int(retrying))
    said = the.state(rows[1])
    assert (said["done"], said["leased_until"], said["attempts"]) == (False, False, int(retrying))


@pytest.mark.parametrize("before", [0, 4], ids=["first batch", "later batch"])
def test_a_stop_costs_no_attempt_and_frees_the_leases(before: int) -> None:
    rows = the.errands(before + 4)
    stop, handled = Event(), []

    def handle(row: Errand) -> None:
        handled.append(row.pk)
        if len(handled) == before + 2:
            stop.set()

    report = the.at_least_once(handle, batch_size=4, retry=the.retry())(stop=stop)
    assert_run(report, processed=before + 2, stopped="signal")
    assert all(the.untouched(row) for row in rows[-2:])


def test_a_timeout_costs_no_attempt_and_frees_the_leases(clock: Clock) -> None:
    rows = the.errands(3)

    def handle(row: Errand) -> None:
        clock.passed += HOUR

    report = the.at_least_once(handle, batch_size=3, retry=the.retry())(timeout=HOUR)
    assert_run(report, processed=1, stopped="timeout")
    assert all(the.untouched(row) for row in rows[1:])


@pytest.mark.parametrize("before", [0, 3], ids=["first batch", "later batch"])
def test_an_interrupt_costs_no_attempt_and_frees_the_leases(before: int) -> None:
    rows = the.errands(before + 3)
    handled: list[Any] = []

    def handle(row: Errand) -> None:
        handled.append(row.pk)
        if len(handled) == before + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        the.at_least_once(handle, batch_size=3, retry=the.retry())()
    assert all(the.state(row)["done"] for row in rows[: before + 1])
    assert all(the.untouched(row) for row in rows[before + 1 :])
    assert the.our_threads() == []


def test_a_handler_may_save_its_row() -> None:
    """A save() takes neither lease nor attempt back."""
    [row] = the.errands(1)

    def save(row: Errand) -> None:
        row.result = "saved"
        row.save()
        assert the.state(row)["attempts"] == 1

    run = the.at_least_once(save, retry=the.retry())
    assert_run(run(), processed=1)
    said = the.state(row)
    assert (said["done"], said["result"], said["attempts"]) == (True, "saved", 0)


def test_a_handler_may_have_a_transaction_of_its_own() -> None:
    rows = the.errands(2)

    def work(row: Errand) -> None:
        with transaction.atomic():
            Errand.objects.filter(pk=row.pk).update(result="work")
            if row.place == 0:
                raise ValueError

    report = the.at_least_once(work)()
    assert_run(report, processed=1, failed=1)
    assert [the.state(row)["result"] for row in rows] == ["", "work"]


def test_inside_testcase_it_works_in_savepoints() -> None:
    the.errands(3)
    block = transaction.atomic()
    block._from_testcase = True  # type: ignore[attr-defined]  # Django's own mark
    with block:
        report = the.at_least_once(the.ignore, batch_size=2, retry=the.retry())()
        assert the.our_threads() == []
    assert_run(report, processed=3)


def test_a_limit_leases_no_more_rows_than_it_allows() -> None:
    rows = the.errands(3)
    seen: list[int] = []

    def look(row: Errand) -> None:
        seen.append(Errand.objects.filter(leased_until__isnull=False).count())

    report = the.at_least_once(look, batch_size=3, retry=the.retry())(limit=2)
    assert_run(report, processed=2, stopped="limit")
    assert seen == [2, 1]
    assert the.untouched(rows[2])


def test_filter_narrows_the_claim_too() -> None:
    rows = the.errands(3)
    report = the.at_least_once(the.ignore, lease=Lease(30))(filter=Q(pk=rows[1].pk))
    assert_run(report, processed=1)
    assert [the.state(row)["done"] for row in rows] == [False, True, False]
