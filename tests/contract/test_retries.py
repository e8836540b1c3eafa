"""What becomes of rows that are not handled: attempts, delays, giving up, Snooze and Discard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from dcl_processor import Delivery, Discard, Lease, Retry, Snooze, batch_processor
from dcl_processor.exceptions import InvalidOption
from dcl_processor.pending.clock import DatabaseNow
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import HOUR, delay, fail, make_due, retrying
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(params=[1, 10])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_failure_takes_back_the_work_and_notes_the_attempt(batch_size: int) -> None:
    the.errands(3)
    report = retrying(fail, batch_size=batch_size)()
    assert_run(report, processed=2, failed=1, to_retry=1)
    row = Errand.objects.get(place=1)
    assert (row.done, row.dead, row.result) == (False, False, "")
    assert (row.attempts, row.last_error) == (1, "ValueError: no such place")
    assert HOUR - 60 < delay(1) <= HOUR
    others = Errand.objects.exclude(place=1).values_list("done", "attempts", "last_error")
    assert list(others) == [(True, 0, "")] * 2


def test_a_row_is_tried_when_it_is_due_and_not_before() -> None:
    the.errands(2)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        raise ValueError

    run = retrying(handle)
    assert_run(run(), failed=2, to_retry=2)
    assert_run(run())
    Errand.objects.filter(place=1).update(next_attempt_at=DatabaseNow() - timedelta(seconds=1))
    assert_run(run(), failed=1, to_retry=1)
    assert calls == [0, 1, 1]
    assert list(Errand.objects.order_by("place").values_list("attempts", flat=True)) == [1, 2]


def test_the_last_attempt_writes_the_dead_letter(batch_size: int) -> None:
    the.errands(3)
    retry = Retry(max_attempts=2, backoff=HOUR)
    run = retrying(fail, retry=retry, failed={"dead": True}, batch_size=batch_size)
    assert_run(run(), processed=2, failed=1, to_retry=1)
    assert not Errand.objects.get(place=1).dead
    make_due()
    assert_run(run(), failed=1)
    row = Errand.objects.get(place=1)
    assert (row.dead, row.done, row.attempts, row.result) == (True, False, 2, "")
    assert (row.next_attempt_at, row.last_error) == (None, "ValueError: no such place")
    make_due()
    assert_run(run())


def test_an_error_that_is_not_worth_another_attempt_is_given_up_on_at_once() -> None:
    """Also without a dead letter: the row would be due again in the next run."""
    errors = {0: TimeoutError(), 1: ConnectionRefusedError(), 2: ValueError()}
    retry = Retry(on=OSError, give_up_on=ConnectionRefusedError, backoff=HOUR)

    def handle(row: Errand) -> None:
        raise errors[row.place]

    the.errands(3)
    assert_run(retrying(handle, retry=retry, failed={"dead": True})(), failed=3, to_retry=1)
    rows = Errand.objects.order_by("place").values_list("dead", "attempts")
    assert list(rows) == [(False, 1), (True, 1), (True, 1)]

    Errand.objects.all().delete()
    the.errands(3)
    run = retrying(handle, retry=retry)
    assert_run(run(), failed=3, to_retry=1)
    make_due()
    assert [failure.error for failure in run().failures] == [errors[0]]


# --- a success clears the columns


CLEARED = {"attempts": 0, "next_attempt_at": None, "last_error": ""}


def retry_columns(row: Errand) -> dict[str, Any]:
    columns: dict[str, Any] = Errand.objects.values(*CLEARED).get(pk=row.pk)
    return columns


@the.all_deliveries
def test_a_row_that_becomes_pending_again_and_again_is_handled_each_time(make: Any) -> None:
    rows = the.errands(3)
    handled: list[Any] = []
    run = make(lambda row: handled.append(row.pk), failed={"dead": True}, **the.retried(make))
    for _ in range(7):
        assert_run(run(), processed=3)
        Errand.objects.update(done=False, claimed=False)  # as an edit does to a "dirty" flag
    assert len(handled) == 21
    assert [retry_columns(row) for row in rows] == [CLEARED] * 3


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
def test_a_flip_of_the_handlers_own_clears_them_too(make: Any) -> None:
    rows = the.errands(2)
    failing = True

    def handle(row: Errand) -> None:
        if failing:
            raise ValueError
        Errand.objects.filter(pk=row.pk).update(done=True)

    run = make(handle, done=None, retry=the.retry())
    assert_run(run(), failed=2, to_retry=2)
    assert [retry_columns(row)["attempts"] for row in rows] == [1, 1]
    failing = False
    assert_run(run(), processed=2)
    assert [retry_columns(row) for row in rows] == [CLEARED] * 2


def test_values_of_the_users_own_win() -> None:
    """A project may keep the last error, or count attempts over all of a row's lives."""
    [row] = the.errands(1, attempts=2, last_error="ValueError")
    done = {"done": True, "last_error": "none"}
    assert_run(the.transactional(the.ignore, done=done, retry=the.retry())(), processed=1)
    assert retry_columns(row) == {**CLEARED, "last_error": "none"}


# --- what is noted of an attempt


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\0b"), "ValueError: ab"),
        (ValueError("half \ud83d a pair"), "ValueError: half ? a pair"),
        (KeyError("name"), "KeyError: 'name'"),
        (ValueError(), "ValueError: ValueError()"),
    ],
    ids=["NUL", "surrogate", "quoted", "empty"],
)
def test_what_no_column_takes_is_taken_out_of_the_error(error: Exception, said: str) -> None:
    the.errands(1)
    assert_run(retrying(the.raising(error))(), failed=1, to_retry=1)
    row = Errand.objects.get()
    assert (row.attempts, row.last_error) == (1, said)


def test_a_long_error_is_cut_to_what_the_column_holds() -> None:
    the.errands(1)
    handle = the.raising(ValueError("x" * 100_000))
    assert_run(retrying(handle)(), failed=1, to_retry=1)
    assert len(Errand.objects.get().last_error) == 2_000
    Errand.objects.update(next_attempt_at=None)
    assert_run(retrying(handle, retry=Retry(last_error="result"))(), failed=1, to_retry=1)
    assert Errand.objects.get().result == "ValueError: " + "x" * 38


def test_attempts_that_the_queryset_defers_are_counted() -> None:
    the.errands(10)
    Errand.objects.update(attempts=3)
    run = batch_processor(
        pending=Errand.objects.filter(done=False).only("place"),
        done={"done": True},
        retry=Retry(backoff=HOUR),
        batch_size=10,
    )(the.raising(ValueError()))
    assert_run(run(), failed=10, to_retry=10)
    assert set(Errand.objects.values_list("attempts", flat=True)) == {4}


# --- outcomes that are no failures, and what puts a row back


@pytest.mark.parametrize(
    ("snooze", "seconds"),
    [
        (Snooze("later", delay=300), 300),
        (Snooze("later", delay=timedelta(minutes=2)), 120),
        (Snooze("later"), HOUR),
    ],
    ids=["seconds", "timedelta", "backoff"],
)
def test_a_snoozed_row_waits_and_has_lost_no_attempt(
    snooze: Snooze, seconds: int, batch_size: int
) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(result="worked")
        if row.place == 1:
            raise snooze

    run = retrying(handle, batch_size=batch_size)
    report = run()
    assert_run(report, processed=1, snoozed=1)
    assert report.ok
    row = Errand.objects.get(place=1)
    assert (row.done, row.attempts, row.last_error, row.result) == (False, 0, "", "")
    assert seconds - 60 < delay(1) <= seconds
    assert_run(run())


def test_a_row_may_be_snoozed_until_a_time() -> None:
    the.errands(1)
    until = datetime(2100, 1, 1, tzinfo=UTC)
    assert_run(retrying(the.raising(Snooze(until=until)))(), snoozed=1)
    assert Errand.objects.get().next_attempt_at == until


def test_a_discarded_row_gets_the_dead_letter_at_once_and_is_no_failure(batch_size: int) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(result="worked")
        if row.place == 1:
            raise Discard("no such customer")

    report = retrying(handle, failed={"dead": True}, batch_size=batch_size)()
    assert_run(report, processed=1, discarded=1)
    assert report.ok
    row = Errand.objects.get(place=1)
    assert (row.dead, row.done, row.attempts, row.result) == (True, False, 1, "")
    assert row.last_error == "Discard: no such customer"


@pytest.mark.parametrize("retry", [None, Retry(backoff=HOUR)], ids=["alone", "retry"])
def test_discard_without_a_dead_letter_is_a_failure_that_says_so(retry: Retry | None) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 0:
            raise Discard("never")

    report = retrying(handle, retry=retry)()
    assert_run(report, processed=1, failed=1)
    assert isinstance(report.failures[0].error, InvalidOption)
    assert "expected failed=" in str(report.failures[0].error)
    assert Errand.objects.get(place=0).done is False


def test_requeue_makes_rows_as_if_they_had_never_been_tried() -> None:
    the.errands(3)
    bad = {1, 2}

    def handle(row: Errand) -> None:
        if row.place in bad:
            raise ValueError("bad")

    run = retrying(
        handle, retry=Retry(max_attempts=1), failed={"dead": True}, reset={"dead": False}
    )
    assert_run(run(), processed=1, failed=2)
    dead: QuerySet[Errand, Errand] = Errand.objects.filter(dead=True, place=1)
    assert run.requeue(dead) == 1
    row = Errand.objects.get(place=1)
    assert (row.attempts, row.next_attempt_at, row.last_error, row.dead) == (0, None, "", False)
    assert Errand.objects.get(place=2).dead
    bad.clear()
    assert_run(run(), processed=1)
    assert Errand.objects.filter(done=True).count() == 2


def test_a_claimed_row_that_is_snoozed_is_put_back() -> None:
    [row] = the.errands(1)
    report = the.at_most_once(the.raising(Snooze("later")), reset={"claimed": False})()
    assert_run(report, snoozed=1)
    assert the.untouched(row)


def test_a_claimed_row_that_nothing_puts_back_cannot_be_snoozed() -> None:
    [row] = the.errands(1)
    report = the.at_most_once(the.raising(Snooze("later")))()
    assert_run(report, failed=1)
    assert "got none, so the row stays claimed" in str(report.failures[0].error)
    assert the.state(row)["claimed"] is True


LEASE: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
CLAIM: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "reset": {"claimed": False},
}
RETURNED = [Snooze(delay=60), Discard("never"), ValueError("no"), Snooze, "a result"]


def return_it(row: Errand) -> Any:
    Errand.objects.filter(pk=row.pk).update(result="worked")
    return RETURNED[row.place]


async def return_it_later(row: Errand) -> Any:
    return RETURNED[row.place]


def return_them(rows: list[Errand]) -> Any:
    return [RETURNED[row.place] for row in rows]


@pytest.mark.parametrize(
    ("handler", "options", "concurrency"),
    [
        (return_it, {}, 1),
        (return_it, {"batch_size": 10}, 1),
        *((return_it, kind, concurrency) for kind in (LEASE, CLAIM) for concurrency in (1, 2)),
        *((return_it_later, kind, 2) for kind in (LEASE, CLAIM)),
        *((the.ignore, {**kind, "process_batch": return_them}, 1) for kind in ({}, LEASE)),
    ],
)
def test_an_exception_that_is_returned_is_the_outcome(
    handler: Any, options: dict[str, Any], concurrency: int
) -> None:
    """As a result it would flip its row: a mail would be lost by "return" for "raise"."""
    the.errands(5)
    if "process_batch" in options:
        options = {"batch_size": 10, **options}
    run = retrying(handler, **{"reset": {"done": False}, "failed": {"dead": True}, **options})
    report = run(concurrency=concurrency)
    assert_run(report, processed=1, snoozed=2, discarded=1, failed=1, to_retry=1)
    assert Errand.objects.get(done=True).place == 4
    assert Errand.objects.get(dead=True).place == 1
    if handler is return_it and "delivery" not in options:
        assert Errand.objects.get(result="worked").place == 4  # the work of the others is undone


# --- ``failed``: what is written to a row that is given up on


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("failed", [{"dead": True}, lambda row, error: {"dead": True}], ids=repr)
def test_without_retry_the_first_failure_is_the_last(make: Any, size: int, failed: Any) -> None:
    rows = the.errands(3)
    report = make(fail, failed=failed, batch_size=size)()
    assert_run(report, processed=2, failed=1)
    said = the.state(rows[1])
    assert (said["dead"], said["done"]) == (True, False)
    assert (said["leased_until"], said["claimed_at"]) == (False, False)
    assert [the.state(row)["done"] for row in rows] == [True, False, True]
    assert_run(make(fail, failed=failed)())


@the.all_deliveries
def test_a_function_may_leave_a_row_as_it_is_for_some_errors(make: Any) -> None:
    rows = the.errands(3)

    def handle(row: Errand) -> None:
        if row.place == 1:
            raise OSError("no answer")
        if row.place == 2:
            raise Discard("moved away")

    def failed(row: Errand, error: Exception) -> dict[str, Any] | None:
        return {"dead": True} if isinstance(error, Discard) else None

    process = make(handle, failed=failed)
    report = process()
    assert_run(report, processed=1, failed=1, discarded=1)
    assert the.state(rows[2])["dead"]
    said = the.state(rows[1])
    in_doubt = make is the.at_most_once
    assert (said["dead"], said["claimed"], said["claimed_at"]) == (False, in_doubt, in_doubt)
    if in_doubt:
        assert list(process.in_doubt(older_than=0)) == [rows[1]]
    else:
        assert_run(process(), failed=1)  # still pending


def raises(row: Errand, error: Exception) -> Any:
    raise KeyError("code")


WRONG: dict[str, Callable[..., Any]] = {
    "no mapping": lambda row, error: "dead",
    "unknown column": lambda row, error: {"daed": True},
    "raises": raises,
}


@the.all_deliveries
@pytest.mark.parametrize("retried", [False, True], ids=["", "retry"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_function_that_gives_no_values_is_one_sentence_and_costs_no_other_row(
    make: Any, wrong: Any, retried: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = the.errands(3)
    options: dict[str, Any] = {"reset": {"claimed": False}} if make is the.at_most_once else {}
    if retried:
        options["retry"] = the.retry(max_attempts=1)
    with caplog.at_level(logging.WARNING):
        report = make(fail, failed=wrong, batch_size=3, **options)()
    assert_run(report, processed=2, failed=1)
    # The handler's own error, and in its notes what is wrong with the function.
    assert type(report.failures[0].error) is ValueError
    assert "expected failed to " in report.failures[0].traceback
    assert "attempt was counted" not in caplog.text
    assert "was not settled" not in caplog.text
    said = the.state(rows[1])
    assert (said["dead"], said["attempts"]) == (False, int(retried))
    assert said["claimed"] is (make is the.at_most_once)  # in doubt, or pending
    assert not said["leased_until"]
