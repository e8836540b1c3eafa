"""Retry on the columns that a table has: nullable ones, small ones, and none."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F, Q

from dcl_processor import Snooze
from dcl_processor.backlog import question_of
from dcl_processor.clock import DatabaseNow
from dcl_processor.exceptions import AttemptsUsedUp, InvalidDone, InvalidOption, StillPending
from tests.contract.support import dispatches as the
from tests.contract.support.batches import statements
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
def test_without_a_counter_no_attempt_is_the_last_and_each_delay_is_the_first(
    make: the.Make,
) -> None:
    the.dispatches(1)
    options = {"attempts": None, "next_attempt_at": "not_before", "backoff": HOUR, "jitter": 0}
    run = make(the.always_fails, retry=the.retry(None, **options))
    for _ in range(4):
        report = run()
        assert_run(report, failed=1, to_retry=1)
        assert report.failures[0].attempts == " (again in 3600 s)"
        assert (report.failures[0].attempt, report.failures[0].max_attempts) == (None, None)
        row = Dispatch.objects.annotate(now=DatabaseNow()).get()
        assert row.not_before is not None
        assert HOUR - 60 < (row.not_before - row.now).total_seconds() <= HOUR
        assert_run(run())
        Dispatch.objects.update(not_before=DatabaseNow() - timedelta(seconds=1))
    assert (the.column("tries"), the.column("status")) == ([None], ["queued"])


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


# --- ``max_attempts`` as a column's name, and as a function of the row


#: By place; ``None``: no limit.
ALLOWED = [1, 3, None]


def by_function(row: Dispatch) -> int | None:
    return row.allowed


each_kind = pytest.mark.parametrize("limit", ["allowed", by_function], ids=["column", "function"])


def rows_with_limits(**values: Any) -> None:
    for row in the.dispatches(len(ALLOWED), **values):
        Dispatch.objects.filter(pk=row.pk).update(allowed=ALLOWED[row.place])


@the.each_way
@each_kind
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("has_failed", [True, False], ids=["dead letter", "none"])
def test_each_row_has_the_attempts_that_it_is_given(
    make: the.Make, limit: Any, batch_size: int, has_failed: bool
) -> None:
    """Without a dead letter one without attempts left is left alone, and not reported."""
    rows_with_limits()
    calls = the.Calls()
    failed: Any = {"status": "failed"} if has_failed else None
    if make is the.at_most_once and not has_failed:
        # What is not put back after the last attempt is in doubt.
        failed = lambda row, error: {"status": "queued"}  # noqa: E731
    run = make(calls.handler(), retry=the.retry(limit), failed=failed, batch_size=batch_size)
    report = run()
    assert_run(report, failed=3, to_retry=2)
    described = {failure.max_attempts: failure.attempts for failure in report.failures}
    assert described == {
        1: " (attempt 1 of 1, given up)",
        3: " (attempt 1 of 3, again in 0 s)",
        None: " (attempt 1, again in 0 s)",
    }
    for number, again in ((2, 2), (2, 1), (1, 1), (1, 1)):
        assert_run(run(), failed=number, to_retry=again)
    assert Counter(calls.places) == {0: 1, 1: 3, 2: 5}
    last = "failed" if has_failed else "queued"
    assert (the.column("tries"), the.column("status")) == ([1, 3, 5], [last, last, "queued"])
    assert the.column("leased_until") == the.column("claimed_at") == [None] * 3


@the.each_way
def test_a_column_keeps_used_up_rows_from_being_read_and_a_function_from_being_handled(
    make: the.Make,
) -> None:
    rows_with_limits(tries=3)
    Dispatch.objects.filter(allowed=None).delete()
    with statements() as seen:
        assert_run(make(the.always_fails, retry=the.retry("allowed"))())
    assert len(seen) == 1
    # So the lock and the second check may be one statement.
    processor = make(the.always_fails, retry=the.retry("allowed"))
    assert question_of(processor, None, processor._due).own_table
    with statements() as seen:
        assert_run(make(the.always_fails, retry=the.retry(by_function))())
    assert len(seen) > 1
    assert (the.column("tries"), the.column("status")) == ([3, 3], ["queued"] * 2)


@the.each_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_function_that_gives_no_number_fails_its_row_alone_and_costs_no_attempt(
    make: the.Make, batch_size: int
) -> None:
    rows_with_limits(tries=1)
    calls: list[int] = []

    def limit(row: Dispatch) -> Any:
        if row.allowed == 1:
            raise KeyError("plan")
        return "three" if row.allowed == 3 else None

    def handle(row: Dispatch) -> None:
        calls.append(row.place)

    report = make(handle, retry=the.retry(limit), batch_size=batch_size)()
    assert_run(report, processed=1, failed=2)
    errors = sorted(str(failure.error) for failure in report.failures)
    assert [type(failure.error) for failure in report.failures] == [InvalidOption] * 2
    assert "expected Retry's max_attempts to return a whole number, or None" in errors[0]
    assert "got 'three'." in errors[0]
    assert "got KeyError raised by it: 'plan'" in errors[1]
    assert calls == [2]
    assert (the.column("tries"), the.column("leased_until")) == ([1, 1, 0], [None] * 3)
    assert the.column("status") == ["queued", "queued", "sent"]
    assert the.column("claimed_at") == [None] * 3


def test_process_batch_gets_the_rows_that_have_attempts_left() -> None:
    rows_with_limits(tries=1)
    got: list[list[int]] = []

    def together(rows: list[Dispatch]) -> None:
        got.append([row.place for row in rows])

    retry = the.retry(by_function)
    run = the.transactional(the.always_fails, retry=retry, batch_size=3, process_batch=together)
    assert_run(run(), processed=2)
    assert got == [[1, 2]]
    assert the.column("status") == ["queued", "sent", "sent"]
    Dispatch.objects.filter(place=2).update(status="queued", tries=9, allowed=2)
    assert_run(run())
    assert len(got) == 1


@pytest.mark.parametrize("limit", [1, "allowed", by_function], ids=["number", "column", "function"])
@pytest.mark.parametrize("values", [{"status": "failed"}, None], ids=["dead letter", "none"])
def test_a_function_as_dead_letter_is_asked_once_about_a_last_attempt_that_lapsed(
    limit: Any, values: dict[str, Any] | None
) -> None:
    """And not about rows that it has left as they are."""
    the.dispatches(2, allowed=1, tries=1)
    lapsed = DatabaseNow() - timedelta(seconds=1)
    Dispatch.objects.filter(place=1).update(leased_until=lapsed)
    asked: list[int] = []

    def failed(row: Dispatch, error: Exception) -> dict[str, Any] | None:
        asked.append(row.place)
        return values

    calls = the.Calls()
    run = the.at_least_once(calls.handler(), retry=the.retry(limit), failed=failed)
    report = run()
    assert_run(report, failed=1)
    assert type(report.failures[0].error) is AttemptsUsedUp
    assert_run(run())
    assert (asked, calls.places) == ([1], [])
    assert the.column("status") == ["queued", values["status"] if values else "queued"]
    assert (the.column("tries"), the.column("leased_until")) == ([1, 1], [None] * 2)


# --- ``on_failure``: what is written at every failure, and at nothing else


DEFERRED = {"status": "deferred", "priority": F("priority") + 10}
FAILED = {"status": "failed"}


@the.each_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_it_is_written_at_every_failure_and_the_dead_letter_wins_at_the_last(
    make: the.Make, batch_size: int
) -> None:
    rows = the.dispatches(3)
    for row in rows:
        Dispatch.objects.filter(pk=row.pk).update(priority=row.place)
    retry = the.retry(3, on_failure=DEFERRED)
    run = make(the.always_fails, retry=retry, failed=FAILED, batch_size=batch_size)
    for attempt in (1, 2):
        assert_run(run(), failed=3, to_retry=3)
        assert (the.column("status"), the.column("tries")) == (["deferred"] * 3, [attempt] * 3)
        assert the.column("priority") == [10 * attempt + place for place in range(3)]
    assert_run(run(), failed=3)
    assert (the.column("status"), the.column("tries")) == (["failed"] * 3, [3] * 3)
    assert the.column("priority") == [30, 31, 32]
    assert the.column("leased_until") == the.column("claimed_at") == [None] * 3


NOT_CALLED = "was called"


def not_to_be_called(row: Dispatch) -> None:
    pytest.fail(NOT_CALLED)


@the.each_way
def test_values_that_take_the_row_out_of_pending_are_refused_before_any_handler(
    make: the.Make,
) -> None:
    the.dispatches(2)
    retry = the.retry(on_failure={"status": "broken"})
    with pytest.raises(InvalidDone, match=r"on_failure=\{'status': 'broken'\} to keep row "):
        make(not_to_be_called, retry=retry)()
    assert (the.column("status"), the.column("tries")) == (["queued"] * 2, [None] * 2)


@the.each_way
def test_a_dead_letter_that_they_keep_in_pending_is_refused(make: the.Make) -> None:
    """Alone it would take the row out of pending, and together with these values it does not."""
    the.dispatches(1)
    pending = Dispatch.objects.filter(Q(status="queued", priority=0) | Q(status="deferred"))
    retry = the.retry(on_failure={"status": "deferred"})
    with pytest.raises(StillPending, match=r"expected failed=\{'status': 'deferred', 'priority': "):
        make(not_to_be_called, pending=pending, retry=retry, failed={"priority": 1})()
    assert the.column("status") == ["queued"]


def test_a_row_in_doubt_after_its_last_attempt_stays_as_its_claim_left_it() -> None:
    the.dispatches(1)
    run = the.at_most_once(the.always_fails, retry=the.retry(1, on_failure=DEFERRED))
    assert_run(run(), failed=1)
    row = Dispatch.objects.get()
    assert (row.status, row.priority, row.tries) == ("sending", 0, 1)
    assert list(run.in_doubt(older_than=0)) == [row]


def test_a_row_of_at_most_once_is_put_back_with_these_values_in_place_of_reset() -> None:
    the.dispatches(1)
    run = the.at_most_once(the.always_fails, retry=the.retry(2, on_failure={"status": "deferred"}))
    assert_run(run(), failed=1, to_retry=1)
    row = Dispatch.objects.get()
    assert (row.status, row.claimed_at) == ("deferred", None)
    assert list(run.in_doubt(older_than=0)) == []


def test_a_row_whose_last_attempt_lapsed_gets_them_and_the_dead_letter() -> None:
    the.dispatches(2, tries=2, leased_until=DatabaseNow() - timedelta(seconds=1))
    run = the.at_least_once(
        not_to_be_called, retry=the.retry(2, on_failure=DEFERRED), failed={"status": "failed"}
    )
    report = run()
    assert_run(report, failed=2)
    assert {type(failure.error) for failure in report.failures} == {AttemptsUsedUp}
    assert (the.column("priority"), the.column("status")) == ([10, 10], ["failed"] * 2)
    assert the.column("tries") == [2, 2]
