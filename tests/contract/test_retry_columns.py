"""Retry on the columns that a table has: nullable ones, small ones, and none."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from dcl_processor import Delivery, Lease, Snooze
from dcl_processor.clock import DatabaseNow
from dcl_processor.exceptions import AttemptsUsedUp, InvalidOption
from tests.contract.support import dispatches as the
from tests.contract.support.batches import statements
from tests.contract.support.reports import assert_run
from tests.models import Dispatch

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HOUR = 3600
FULL = 2**15 - 1


@the.each_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_null_counts_as_no_attempt_and_the_last_one_writes_the_dead_letter(
    make: the.Make, batch_size: int
) -> None:
    the.dispatches(3)
    run = make(
        the.always_fails, retry=the.retry(3), failed={"status": "failed"}, batch_size=batch_size
    )
    for attempt in (1, 2):
        assert_run(run(), failed=3, retried=3)
        assert the.column("tries") == [attempt] * 3
        assert the.column("status") == ["queued"] * 3
    assert_run(run(), failed=3)
    assert (the.column("tries"), the.column("status")) == ([3] * 3, ["failed"] * 3)
    assert_run(run())


@the.each_way
def test_rows_with_null_and_with_a_number_are_due_until_the_number_is_reached(
    make: the.Make,
) -> None:
    rows = the.dispatches(4)
    for row, tries in zip(rows, [None, 0, 1, 2], strict=True):
        Dispatch.objects.filter(pk=row.pk).update(tries=tries)
    run = make(the.always_fails, retry=the.retry(2))
    assert_run(run(), failed=3, retried=2)
    assert the.column("tries") == [1, 1, 2, 2]
    assert_run(run(), failed=2)
    assert_run(run())


@the.each_way
@pytest.mark.parametrize(
    "options", [{}, {"strict_order": True}, {"batch_size": 3}, {"concurrency": 3}], ids=str
)
def test_without_a_time_a_failed_row_is_tried_once_in_each_run(
    make: the.Make, options: dict[str, Any]
) -> None:
    the.dispatches(3)
    calls = the.Calls()
    run = make(calls.handler(), retry=the.retry(9), **options)
    for runs in (1, 2, 3):
        report = run()
        assert_run(report, failed=3, retried=3)
        assert sorted(calls.places) == sorted([0, 1, 2] * runs)
        assert the.column("tries") == [runs] * 3
    first = report.failures[0]
    assert (first.attempt, first.max_attempts, first.again_in, first.is_final) == (3, 9, 0.0, False)
    assert first.attempts == " (attempt 3 of 9, again in 0 s)"


@the.each_way
def test_a_success_clears_the_columns_that_there_are_and_no_other(make: the.Make) -> None:
    the.dispatches(2, tries=2, reason="no answer", many_tries=5)
    given = {"last_error": "reason", "next_attempt_at": "not_before"}
    assert_run(make(lambda row: None, retry=the.retry(**given))(), processed=2)
    assert (the.column("tries"), the.column("reason")) == ([0, 0], ["", ""])
    Dispatch.objects.update(status="queued", tries=2, reason="no answer")
    assert_run(make(lambda row: None, retry=the.retry())(), processed=2)
    assert (the.column("tries"), the.column("reason")) == ([0, 0], ["no answer"] * 2)
    assert the.column("many_tries") == [5, 5]


@the.each_way
def test_without_a_counter_no_attempt_is_the_last_and_each_delay_is_the_first(
    make: the.Make,
) -> None:
    the.dispatches(1)
    options = {"attempts": None, "next_attempt_at": "not_before", "backoff": HOUR, "jitter": 0}
    run = make(the.always_fails, retry=the.retry(None, **options))
    for _ in range(4):
        report = run()
        assert_run(report, failed=1, retried=1)
        assert report.failures[0].attempts == " (again in 3600 s)"
        assert (report.failures[0].attempt, report.failures[0].max_attempts) == (None, None)
        row = Dispatch.objects.annotate(now=DatabaseNow()).get()
        assert row.not_before is not None
        assert HOUR - 60 < (row.not_before - row.now).total_seconds() <= HOUR
        assert_run(run())
        Dispatch.objects.update(not_before=DatabaseNow() - timedelta(seconds=1))
    assert (the.column("tries"), the.column("status")) == ([None], ["queued"])


@the.each_way
def test_without_a_counter_an_error_that_is_not_worth_it_writes_the_dead_letter(
    make: the.Make,
) -> None:
    the.dispatches(2)

    def handle(row: Dispatch) -> None:
        raise OSError if row.place else KeyError

    retry = the.retry(None, attempts=None, give_up_on=KeyError)
    report = make(handle, retry=retry, failed={"status": "failed"})()
    assert_run(report, failed=2, retried=1)
    assert the.column("status") == ["failed", "queued"]


@the.each_way
def test_a_row_that_nothing_shows_as_given_up_is_reported_as_tried_again(make: the.Make) -> None:
    """A function as ``failed`` may leave a row as it is, and then there is no count to show it."""
    the.dispatches(1)
    retry = the.retry(None, give_up_on=OSError)
    run = make(the.always_fails, retry=retry, failed=lambda row, error: None)
    for _ in range(2):
        assert_run(run(), failed=1, retried=1)
    assert (the.column("tries"), the.column("status")) == ([2], ["queued"])


@the.each_way
def test_a_small_counter_stops_at_its_highest_number(make: the.Make) -> None:
    """The next number would be refused, and with it the claim of all rows in the batch."""
    rows = the.dispatches(3)
    Dispatch.objects.filter(pk=rows[1].pk).update(tries=FULL)
    run = make(the.always_fails, retry=the.retry(None), batch_size=3)
    for attempt in (1, 2):
        assert_run(run(), failed=3, retried=3)
        assert the.column("tries") == [attempt, FULL, attempt]


@pytest.mark.parametrize("attempts", [0, FULL - 1, FULL])
def test_a_row_that_was_not_started_keeps_its_small_counter(attempts: int) -> None:
    """At its highest number the claim does not increase it."""
    the.dispatches(2)
    handled, stop = list[int](), Event()
    # Both, because rows without an order come in any.
    Dispatch.objects.update(tries=attempts)

    def handle(row: Dispatch) -> None:
        handled.append(row.pk)
        stop.set()

    run = the.at_least_once(handle, retry=the.retry(None), batch_size=2)
    assert_run(run(stop=stop), processed=1, stopped="signal")
    assert Dispatch.objects.exclude(pk__in=handled).get().tries == attempts


@the.each_way
def test_a_small_counter_shows_its_highest_number_as_used_up(make: the.Make) -> None:
    the.dispatches(1, tries=FULL - 1)
    run = make(the.always_fails, retry=the.retry(FULL), failed={"status": "failed"})
    assert_run(run(), failed=1)
    assert (the.column("tries"), the.column("status")) == ([FULL], ["failed"])


@the.each_way
def test_a_limit_that_the_counter_cannot_reach_is_refused(make: the.Make) -> None:
    the.dispatches(1)
    with pytest.raises(InvalidOption, match=r"Dispatch\.tries can hold, at most 32767, got 32768"):
        make(the.always_fails, retry=the.retry(FULL + 1))()
    assert the.column("tries") == [None]


@the.each_way
def test_a_large_counter_counts_beyond_four_bytes(make: the.Make) -> None:
    the.dispatches(1, many_tries=2**40)
    retry = the.retry(None, attempts="many_tries")
    assert_run(make(the.always_fails, retry=retry)(), failed=1, retried=1)
    assert the.column("many_tries") == [2**40 + 1]


@the.each_way
def test_a_snooze_without_a_column_for_its_time_is_a_failure_that_says_so(make: the.Make) -> None:
    the.dispatches(2)

    def handle(row: Dispatch) -> None:
        raise Snooze(delay=60) if row.place else Snooze()

    run = make(handle, retry=the.retry())
    report = run()
    assert_run(report, failed=1, snoozed=1)
    assert "expected Retry's next_attempt_at to name the column" in str(report.failures[0].error)
    assert the.column("status") == ["queued"] * 2
    assert {tries or 0 for tries in the.column("tries")} == {0}  # neither costs an attempt
    assert_run(run(), failed=1, snoozed=1)


@pytest.mark.parametrize("tries", [3, FULL], ids=["", "full"])
def test_a_lapsed_lease_was_an_attempt_and_the_last_one_is_given_up(tries: int) -> None:
    lapsed = DatabaseNow() - timedelta(seconds=1)
    the.dispatches(3, tries=tries, leased_until=lapsed)
    calls = the.Calls()
    run = the.at_least_once(
        calls.handler(), retry=the.retry(tries), failed={"status": "failed"}, batch_size=3
    )
    report = run()
    assert_run(report, failed=3)
    assert {type(each.error) for each in report.failures} == {AttemptsUsedUp}
    assert calls.places == []
    assert (the.column("tries"), the.column("status")) == ([tries] * 3, ["failed"] * 3)


def test_without_a_counter_a_lapsed_lease_is_handled_again() -> None:
    the.dispatches(2, leased_until=DatabaseNow() - timedelta(seconds=1))
    run = the.at_least_once(the.always_fails, retry=the.retry(None, attempts=None))
    for _ in range(3):
        assert_run(run(), failed=2, retried=2)
    assert (the.column("tries"), the.column("leased_until")) == ([None] * 2, [None] * 2)


@the.each_way
def test_the_default_columns_add_nothing_to_the_lock_free_read(make: the.Make) -> None:
    """A counter that cannot be NULL needs no condition for it."""
    the.dispatches(1, status="sent")
    with statements() as seen:
        make(the.always_fails, retry=the.retry(3, attempts="many_tries"))()
    assert len(seen) == 1
    assert seen[0].count("many_tries") == 1


def test_a_column_of_another_kind_is_refused() -> None:
    the.dispatches(1)
    lease = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
    for options, words in (
        ({"attempts": "reason"}, "attempts='reason' to name an integer column"),
        ({"max_attempts": "status"}, "max_attempts='status' to name an integer column"),
        ({"next_attempt_at": "tries"}, "next_attempt_at='tries' to name a nullable date and time"),
    ):
        with pytest.raises(InvalidOption, match=words):
            the.transactional(the.always_fails, retry=the.retry(**options), **lease)()
