"""Retry on the columns that a table has: nullable ones, small ones, and none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from dcl_processor import Snooze
from dcl_processor.exceptions import AttemptsUsedUp
from dcl_processor.pending.clock import DatabaseNow
from tests.contract.support import dispatches as the
from tests.contract.support.reports import assert_run
from tests.models import Dispatch

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HOUR = 3600


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
        assert_run(run(), failed=3, to_retry=3)
        assert the.column("tries") == [attempt] * 3
        assert the.column("status") == ["queued"] * 3
        assert the.column("leased_until") == the.column("claimed_at") == [None] * 3
    assert_run(run(), failed=3)
    assert (the.column("tries"), the.column("status")) == ([3] * 3, ["failed"] * 3)
    assert the.column("leased_until") == the.column("claimed_at") == [None] * 3
    assert_run(run())


@the.each_way
def test_rows_with_null_and_with_a_number_are_due_until_the_number_is_reached(
    make: the.Make,
) -> None:
    rows = the.dispatches(4)
    for row, tries in zip(rows, [None, 0, 1, 2], strict=True):
        Dispatch.objects.filter(pk=row.pk).update(tries=tries)
    run = make(the.always_fails, retry=the.retry(2))
    assert_run(run(), failed=3, to_retry=2)
    assert the.column("tries") == [1, 1, 2, 2]
    assert_run(run(), failed=2)
    assert_run(run())


@the.each_way
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}], ids=str)
def test_without_a_time_a_failed_row_is_tried_once_in_each_run(
    make: the.Make, options: dict[str, Any]
) -> None:
    the.dispatches(3)
    calls = the.Calls()
    run = make(calls.handler(), retry=the.retry(9), **options)
    for runs in (1, 2, 3):
        report = run()
        assert_run(report, failed=3, to_retry=3)
        assert sorted(calls.places) == sorted([0, 1, 2] * runs)
        assert the.column("tries") == [runs] * 3
    first = report.failures[0]
    assert (first.attempt, first.max_attempts, first.again_in, first.is_final) == (3, 9, 0.0, False)
    assert first.attempts == " (attempt 3 of 9, again in 0 s)"


@the.each_way
def test_without_a_limit_no_attempt_is_the_last(make: the.Make) -> None:
    the.dispatches(1)
    times = {"next_attempt_at": "not_before", "backoff": HOUR, "max_delay": HOUR, "jitter": 0}
    run = make(the.always_fails, retry=the.retry(None, **times))
    for attempt in (1, 2, 3, 4):
        report = run()
        assert_run(report, failed=1, to_retry=1)
        assert report.failures[0].attempts == f" (attempt {attempt}, again in 3600 s)"
        row = Dispatch.objects.annotate(now=DatabaseNow()).get()
        assert row.not_before is not None
        assert HOUR - 60 < (row.not_before - row.now).total_seconds() <= HOUR
        assert_run(run())
        Dispatch.objects.update(not_before=DatabaseNow() - timedelta(seconds=1))
    assert (the.column("tries"), the.column("status")) == ([4], ["queued"])


@the.each_way
def test_a_snooze_without_a_column_for_its_time_is_a_failure_that_says_so(make: the.Make) -> None:
    the.dispatches(2)

    def handle(row: Dispatch) -> None:
        raise Snooze(delay=60) if row.place else Snooze()

    run = make(handle, retry=the.retry())
    report = run()
    assert_run(report, failed=1, snoozed=1)
    assert "expected a Retry with next_attempt_at, the column" in str(report.failures[0].error)
    assert the.column("status") == ["queued"] * 2
    assert {tries or 0 for tries in the.column("tries")} == {0}  # neither costs an attempt
    assert_run(run(), failed=1, snoozed=1)


@pytest.mark.parametrize("values", [{"status": "failed"}, None], ids=["dead letter", "none"])
def test_a_function_as_dead_letter_is_asked_once_about_a_last_attempt_that_lapsed(
    values: dict[str, Any] | None,
) -> None:
    """And not about rows that it has left as they are."""
    the.dispatches(2, tries=1)
    lapsed = DatabaseNow() - timedelta(seconds=1)
    Dispatch.objects.filter(place=1).update(leased_until=lapsed)
    asked: list[int] = []

    def failed(row: Dispatch, error: Exception) -> dict[str, Any] | None:
        asked.append(row.place)
        return values

    calls = the.Calls()
    run = the.at_least_once(calls.handler(), retry=the.retry(1), failed=failed)
    report = run()
    assert_run(report, failed=1)
    assert type(report.failures[0].error) is AttemptsUsedUp
    assert_run(run())
    assert (asked, calls.places) == ([1], [])
    assert the.column("status") == ["queued", values["status"] if values else "queued"]
    assert (the.column("tries"), the.column("leased_until")) == ([1, 1], [None] * 2)


@the.each_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_without_attempts_left_get_the_dead_letter_and_no_call(
    make: the.Make, batch_size: int
) -> None:
    the.dispatches(3, tries=3)
    calls = the.Calls()
    retry, failed = the.retry(3), {"status": "failed"}
    report = make(calls.handler(), retry=retry, failed=failed, batch_size=batch_size)()
    assert_run(report, failed=3)
    assert {type(failure.error) for failure in report.failures} == {AttemptsUsedUp}
    assert calls.places == []
    assert (the.column("status"), the.column("tries")) == (["failed"] * 3, [3] * 3)
