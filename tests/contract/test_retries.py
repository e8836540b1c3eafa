"""TRANSACTIONAL with a retry: attempts, delays, and giving up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from dcl_processor import Retry, batch_processor
from dcl_processor.clock import DatabaseNow
from tests.contract.support import errands as the
from tests.contract.support.batches import statements
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


RESET = {"reset": {"claimed": False}}
DELIVERIES: dict[str, Any] = {
    "transactional": the.transactional,
    "at most once": lambda handler, **options: the.at_most_once(handler, **RESET, **options),
    "at least once": the.at_least_once,
}
each_delivery = pytest.mark.parametrize("make", DELIVERIES.values(), ids=DELIVERIES)


def retry_columns(row: Errand) -> dict[str, Any]:
    columns: dict[str, Any] = Errand.objects.values(*CLEARED).get(pk=row.pk)
    return columns


def soil(rows: list[Errand]) -> None:
    """Make rows pending again, as an edit does to a "dirty" flag."""
    Errand.objects.filter(pk__in=[row.pk for row in rows]).update(done=False, claimed=False)


@each_delivery
def test_a_row_that_becomes_pending_again_and_again_is_handled_each_time(make: Any) -> None:
    rows = the.errands(3)
    handled: list[Any] = []
    run = make(lambda row: handled.append(row.pk), retry=the.retry(), failed={"dead": True})
    for _ in range(7):
        report = run()
        assert_run(report, processed=3)
        soil(rows)
    assert len(handled) == 21
    assert [retry_columns(row) for row in rows] == [CLEARED] * 3


def test_a_row_that_stays_pending_is_handled_in_every_run() -> None:
    """``repeats`` without ``failed``: used-up attempts would hide the row for good."""
    the.errands(2)
    run = the.at_least_once(the.ignore, done={"result": "seen"}, repeats=True, retry=the.retry())
    for _ in range(6):
        assert_run(run(), processed=2)


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


def test_the_attempt_is_written_in_the_transaction_that_has_the_lock() -> None:
    """One commit: between the failure and its note no other session can take the row."""
    the.errands(1)
    seen: list[tuple[str, bool]] = []

    def watch(execute: Any, sql: str, *args: Any) -> Any:
        seen.append((sql, connection.in_atomic_block))
        return execute(sql, *args)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(result="worked")
        raise ValueError

    run = retrying(handle)
    with connection.execute_wrapper(watch):
        run()
    updates = [sql.startswith("UPDATE") and "result" in sql.split("WHERE")[0] for sql, _ in seen]
    after = [each for each in seen[updates.index(True) + 1 :] if "dcl_fence" not in each[0]]
    words = [sql.split()[0] for sql, _ in after[:5]]
    # The savepoint is that of the note.
    assert words == ["ROLLBACK", "RELEASE", "SAVEPOINT", "UPDATE", "RELEASE"]
    assert "last_error" in after[3][0]
    assert all(atomic for _, atomic in after[:5])
    noted = [sql for sql, _ in seen if "last_error" in sql and "UPDATE" in sql[:6]]
    assert len([sql for sql in noted if "done" not in sql]) == 1  # beside the flip's rehearsal


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


def test_attempts_that_the_queryset_defers_are_read_once_for_all() -> None:
    the.errands(10)
    Errand.objects.update(attempts=3)
    run = batch_processor(
        pending=Errand.objects.filter(done=False).only("place"),
        done={"done": True},
        retry=Retry(backoff=HOUR),
        batch_size=10,
    )(the.raising(ValueError()))
    with statements() as seen:
        assert_run(run(), failed=10, to_retry=10)
    # MariaDB is asked by one, too, what the session sees, and for triggers, as SQLite is.
    most = 7 if connection.vendor == "mysql" else 6
    assert len([sql for sql in seen if sql.startswith("SELECT")]) <= most
    assert set(Errand.objects.values_list("attempts", flat=True)) == {4}
