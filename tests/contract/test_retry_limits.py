"""``max_attempts`` as a column's name, and as a function of the row."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from dcl_processor.clock import DatabaseNow
from dcl_processor.exceptions import AttemptsUsedUp, InvalidOption
from dcl_processor.testing.questions import question_of
from tests.contract.support import dispatches as the
from tests.contract.support.batches import statements
from tests.contract.support.reports import assert_run
from tests.models import Dispatch

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

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
def test_each_row_has_the_attempts_that_it_is_given(
    make: the.Make, limit: Any, batch_size: int
) -> None:
    rows_with_limits()
    calls = the.Calls()
    options = {"failed": {"status": "failed"}, "batch_size": batch_size}
    run = make(calls.handler(), retry=the.retry(limit), **options)
    report = run()
    assert_run(report, failed=3, retried=2)
    described = {failure.max_attempts: failure.attempts for failure in report.failures}
    assert described == {
        1: " (attempt 1 of 1, given up)",
        3: " (attempt 1 of 3, again in 0 s)",
        None: " (attempt 1, again in 0 s)",
    }
    assert_run(run(), failed=2, retried=2)
    assert_run(run(), failed=2, retried=1)
    assert_run(run(), failed=1, retried=1)
    assert Counter(calls.places) == {0: 1, 1: 3, 2: 4}
    assert the.column("status") == ["failed", "failed", "queued"]
    assert the.column("tries") == [1, 3, 4]


@the.each_way
@each_kind
@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_a_dead_letter_a_row_without_attempts_left_is_left_alone_and_not_reported(
    make: the.Make, limit: Any, batch_size: int
) -> None:
    rows_with_limits()
    calls = the.Calls()
    # What AT_MOST_ONCE does not put back after the last attempt is in doubt.
    failed = {"failed": lambda row, error: {"status": "queued"}} if make is the.at_most_once else {}
    run = make(calls.handler(), retry=the.retry(limit), batch_size=batch_size, **failed)
    retried = [2, 2, 1, 1, 1]
    for number, again in zip([3, 2, 2, 1, 1], retried, strict=True):
        assert_run(run(), failed=number, retried=again)
    assert Counter(calls.places) == {0: 1, 1: 3, 2: 5}
    assert (the.column("tries"), the.column("status")) == ([1, 3, 5], ["queued"] * 3)
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
    assert question_of(make(the.always_fails, retry=the.retry("allowed")), None).own_table
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


@the.each_way
def test_a_function_tells_how_many_attempts_are_left_if_no_column_counts_them(
    make: the.Make,
) -> None:
    the.dispatches(2, allowed=2)
    Dispatch.objects.filter(place=1).update(allowed=0)
    calls = the.Calls()

    def left(row: Dispatch) -> int | None:
        return None if row.allowed is None else row.allowed - row.priority

    retry = the.retry(left, attempts=None, on_failure={"priority": 1})
    run = make(calls.handler(), retry=retry, failed=lambda row, error: {"priority": 2})
    assert_run(run(), failed=1, retried=1)
    # AT_MOST_ONCE leaves a row claimed whose last attempt has failed: it is in doubt.
    assert_run(run(), failed=1)
    Dispatch.objects.update(status="queued")
    assert_run(run())
    assert calls.places == [0, 0]


@the.each_way
def test_a_limit_that_the_queryset_defers_is_read_once_for_all(make: the.Make) -> None:
    rows_with_limits()
    pending = the.PENDING.only("place")
    options = {"pending": pending, "batch_size": 3, "failed": {"status": "failed"}}
    with statements() as seen:
        assert_run(
            make(the.always_fails, retry=the.retry("allowed"), **options)(), failed=3, retried=2
        )
    reading = [
        sql for sql in seen if sql.startswith("SELECT") and "allowed" in sql.split(" FROM")[0]
    ]
    assert len(reading) == 1


@the.each_way
@each_kind
def test_a_handler_that_changes_the_instance_does_not_change_the_limit(
    make: the.Make, limit: Any
) -> None:
    rows_with_limits()

    def handle(row: Dispatch) -> None:
        row.allowed = 99
        raise OSError

    run = make(handle, retry=the.retry(limit), failed={"status": "failed"})
    assert_run(run(), failed=3, retried=2)
    assert the.column("status") == ["failed", "queued", "queued"]


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


@each_kind
def test_a_lapsed_lease_that_was_the_last_attempt_of_its_row_is_given_up(limit: Any) -> None:
    rows_with_limits(tries=2, leased_until=DatabaseNow() - timedelta(seconds=1))
    calls = the.Calls()
    run = the.at_least_once(calls.handler(), retry=the.retry(limit), failed={"status": "failed"})
    assert_run(run(), failed=3, retried=1)
    assert calls.places == [1, 2]
    assert the.column("status") == ["failed", "failed", "queued"]
    # Not the attempt that the claim counted and that did not take place.
    assert the.column("tries") == [1, 3, 3]


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


@each_kind
def test_a_lapsed_lease_of_a_used_up_row_stays_without_a_dead_letter(limit: Any) -> None:
    rows_with_limits(tries=1, leased_until=DatabaseNow() - timedelta(seconds=1))
    run = the.at_least_once(the.always_fails, retry=the.retry(limit))
    assert_run(run(), failed=2, retried=2)
    assert the.column("tries") == [1, 2, 2]
    assert the.column("status") == ["queued"] * 3
