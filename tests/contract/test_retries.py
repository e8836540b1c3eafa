"""TRANSACTIONAL with a retry: attempts, delays, and giving up."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from dcl_processor import Retry
from dcl_processor.clock import DatabaseNow
from tests.contract.support import errands as the
from tests.contract.support.batches import savepoints, sent, statements
from tests.contract.support.parcels import in_batches, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import HOUR, delay, fail, make_due, retrying
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(params=[1, 10])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_a_failure_takes_back_the_work_and_notes_the_attempt(batch_size: int) -> None:
    the.errands(3)
    report = retrying(fail, batch_size=batch_size)()
    assert_run(report, processed=2, failed=1, retried=1)
    row = Errand.objects.get(place=1)
    assert (row.done, row.dead, row.result) == (False, False, "")
    assert (row.attempts, row.last_error) == (1, "ValueError: no such place")
    assert HOUR - 60 < delay(1) <= HOUR
    others = Errand.objects.exclude(place=1).values_list("done", "attempts", "last_error")
    assert list(others) == [(True, 0, "")] * 2


def test_a_handler_that_does_not_use_the_database_costs_no_savepoint() -> None:
    the.errands(3)
    with statements() as seen:
        assert_run(retrying(lambda row: None)(), processed=3)
    assert savepoints(seen) == []


def test_a_row_is_tried_when_it_is_due_and_not_before() -> None:
    the.errands(2)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        raise ValueError

    run = retrying(handle)
    assert_run(run(), failed=2, retried=2)
    assert_run(run())
    Errand.objects.filter(place=1).update(next_attempt_at=DatabaseNow() - timedelta(seconds=1))
    assert_run(run(), failed=1, retried=1)
    assert calls == [0, 1, 1]
    assert list(Errand.objects.order_by("place").values_list("attempts", flat=True)) == [1, 2]


def test_the_delay_doubles_up_to_the_longest() -> None:
    the.errands(1)
    retry = Retry(max_attempts=9, backoff=100, max_delay=timedelta(seconds=1000), jitter=0)

    def handle(row: Errand) -> None:
        raise ValueError

    run = retrying(handle, retry=retry)
    delays = []
    for _ in range(6):
        make_due()
        assert_run(run(), failed=1, retried=1)
        delays.append(delay(0))
    for expected, waited in zip([100, 200, 400, 800, 1000, 1000], delays, strict=True):
        assert expected - 30 < waited <= expected


def test_jitter_spreads_the_delays_within_its_bounds() -> None:
    the.errands(50)

    def handle(row: Errand) -> None:
        raise ValueError

    retrying(handle, retry=Retry(backoff=1000, jitter=0.5), batch_size=50)()
    delays = [delay(place) for place in range(50)]
    assert all(500 - 30 < each <= 1500 for each in delays)
    assert max(delays) - min(delays) > 200


def test_the_last_attempt_writes_the_dead_letter(batch_size: int) -> None:
    the.errands(3)
    retry = Retry(max_attempts=2, backoff=HOUR)
    run = retrying(fail, retry=retry, failed={"dead": True}, batch_size=batch_size)
    assert_run(run(), processed=2, failed=1, retried=1)
    assert not Errand.objects.get(place=1).dead
    make_due()
    assert_run(run(), failed=1)
    row = Errand.objects.get(place=1)
    assert (row.dead, row.done, row.attempts, row.result) == (True, False, 2, "")
    assert (row.next_attempt_at, row.last_error) == (None, "ValueError: no such place")
    make_due()
    assert_run(run())


def test_get_failed_keeps_what_it_likes_of_the_row_and_the_error() -> None:
    the.errands(3)

    def dead(row: Errand, error: Exception) -> dict[str, Any]:
        return {"dead": True, "result": f"{row.place}: {error}"}

    run = retrying(fail, retry=Retry(max_attempts=1), failed=dead)
    assert_run(run(), processed=2, failed=1)
    assert Errand.objects.get(place=1).result == "1: no such place"
    assert Errand.objects.get(place=1).dead


def test_without_a_dead_letter_a_row_without_attempts_left_is_left_alone() -> None:
    the.errands(1)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        raise ValueError

    run = retrying(handle, retry=Retry(max_attempts=2, backoff=0))
    for _ in range(4):
        run()
    assert calls == [0, 0]
    row = Errand.objects.get()
    assert (row.done, row.attempts, row.next_attempt_at) == (False, 2, None)


def test_an_error_that_is_not_worth_another_attempt_is_given_up_on_at_once() -> None:
    """Also without a dead letter: the row would be due again in the next run."""
    errors = {0: TimeoutError(), 1: ConnectionRefusedError(), 2: ValueError()}
    retry = Retry(on=OSError, give_up_on=ConnectionRefusedError, backoff=HOUR)

    def handle(row: Errand) -> None:
        raise errors[row.place]

    the.errands(3)
    assert_run(retrying(handle, retry=retry, failed={"dead": True})(), failed=3, retried=1)
    rows = Errand.objects.order_by("place").values_list("dead", "attempts")
    assert list(rows) == [(False, 1), (True, 1), (True, 1)]

    Errand.objects.all().delete()
    the.errands(3)
    run = retrying(handle, retry=retry)
    assert_run(run(), failed=3, retried=1)
    make_due()
    assert [failure.error for failure in run().failures] == [errors[0]]


def test_the_clock_of_python_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is ten years off neither hurries nor delays anything."""
    the.errands(1)
    real = timezone.now()
    run = retrying(fail)
    Errand.objects.update(place=1)
    for years in (-10, 10):
        wrong = real + timedelta(days=365 * years)
        monkeypatch.setattr(timezone, "now", lambda wrong=wrong: wrong)
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong.timestamp())
        Errand.objects.update(next_attempt_at=None, attempts=0)
        assert_run(run(), failed=1, retried=1)
        assert HOUR - 60 < delay(1) <= HOUR
        assert_run(run())


def test_two_processors_on_one_model_keep_their_own_columns() -> None:
    """The second borrows columns of another name, as a model that was there before has them."""
    depot = Depot.objects.create()
    Parcel.objects.create(depot=depot)
    Errand.objects.create()
    retry = Retry(backoff=HOUR, attempts="place", next_attempt_at="claimed_at", last_error="result")

    def handle(row: Errand) -> None:
        raise ValueError("first" if row.attempts == 0 else "second")

    assert_run(retrying(handle)(), failed=1, retried=1)
    assert_run(retrying(handle, retry=retry)(), failed=1, retried=1)
    row = Errand.objects.get()
    assert (row.attempts, row.last_error) == (1, "ValueError: first")
    assert (row.place, row.result) == (1, "ValueError: second")
    assert row.claimed_at is not None
    assert row.next_attempt_at is not None


def test_without_columns_the_run_goes_past_failing_rows_and_the_next_tries_them_again() -> None:
    parcels(6)

    def handle(row: Parcel) -> None:
        if row.priority < 2:
            raise ValueError

    run = in_batches(handle, batch_size=2)
    report = run()
    assert_run(report, processed=4, failed=2)
    assert sent() == [2, 3, 4, 5]
    assert_run(run(), failed=2)
