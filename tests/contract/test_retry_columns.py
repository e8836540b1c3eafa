"""Retry on the columns that a table has: nullable ones, small ones, and none."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from dcl_processor import Retry, Snooze
from dcl_processor.exceptions import AttemptsUsedUp
from dcl_processor.pending.clock import DatabaseNow
from tests.contract.support import errands as the
from tests.contract.support.errands import Make
from tests.contract.support.reports import assert_run
from tests.models import Dispatch

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HOUR = 3600


def dispatches(number: int, **values: Any) -> list[Dispatch]:
    """Make rows whose ``place`` is their place; return all that there are."""
    Dispatch.objects.bulk_create([Dispatch(place=place, **values) for place in range(number)])
    return list(Dispatch.objects.order_by("place"))


PENDING = Dispatch.objects.filter(status__in=["queued", "deferred"])
ASKED: Any = {"pending": PENDING, "done": {"status": "sent"}}
CLAIM: Any = {"claim": {"status": "sending"}, "reset": {"status": "queued"}}
MAKERS = {
    "transactional": partial(the.transactional, **ASKED),
    "at_most_once": partial(the.at_most_once, **ASKED, **CLAIM),
    "at_least_once": partial(the.at_least_once, **ASKED),
}
each_way = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def retry(max_attempts: int | None = 3, **options: Any) -> Retry:
    """Return a ``Retry`` on a nullable counter of two bytes, and without a time or an error."""
    columns = {"attempts": "tries", "next_attempt_at": None, "last_error": None}
    return Retry(max_attempts, **{**columns, **options})


def column(name: str) -> list[Any]:
    """Return the values of a column by the rows' places."""
    return list(Dispatch.objects.order_by("place").values_list(name, flat=True))


def always_fails(row: Dispatch) -> None:
    raise OSError("no answer")


def counting(places: list[int]) -> Callable[[Dispatch], None]:
    """Return a handler that notes the places of its calls, and always fails."""

    def send(row: Dispatch) -> None:
        places.append(row.place)
        always_fails(row)

    return send


@each_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_null_counts_as_no_attempt_and_the_last_one_writes_the_dead_letter(
    make: Make, batch_size: int
) -> None:
    dispatches(3)
    run = make(always_fails, retry=retry(3), failed={"status": "failed"}, batch_size=batch_size)
    for attempt in (1, 2):
        assert_run(run(), failed=3, to_retry=3)
        assert column("tries") == [attempt] * 3
        assert column("status") == ["queued"] * 3
        assert column("leased_until") == column("claimed_at") == [None] * 3
    assert_run(run(), failed=3)
    assert (column("tries"), column("status")) == ([3] * 3, ["failed"] * 3)
    assert column("leased_until") == column("claimed_at") == [None] * 3
    assert_run(run())


@each_way
def test_rows_with_null_and_with_a_number_are_due_until_the_number_is_reached(make: Make) -> None:
    rows = dispatches(4)
    for row, tries in zip(rows, [None, 0, 1, 2], strict=True):
        Dispatch.objects.filter(pk=row.pk).update(tries=tries)
    run = make(always_fails, retry=retry(2))
    assert_run(run(), failed=3, to_retry=2)
    assert column("tries") == [1, 1, 2, 2]
    assert_run(run(), failed=2)
    assert_run(run())


@each_way
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}], ids=str)
def test_without_a_time_a_failed_row_is_tried_once_in_each_run(
    make: Make, options: dict[str, Any]
) -> None:
    dispatches(3)
    calls: list[int] = []
    run = make(counting(calls), retry=retry(9), **options)
    for runs in (1, 2, 3):
        report = run()
        assert_run(report, failed=3, to_retry=3)
        assert sorted(calls) == sorted([0, 1, 2] * runs)
        assert column("tries") == [runs] * 3
    first = report.failures[0]
    assert (first.attempt, first.max_attempts, first.again_in, first.is_final) == (3, 9, 0.0, False)
    assert first.attempts == " (attempt 3 of 9, again in 0 s)"


@each_way
def test_without_a_limit_no_attempt_is_the_last(make: Make) -> None:
    dispatches(1)
    times = {"next_attempt_at": "not_before", "backoff": HOUR, "max_delay": HOUR, "jitter": 0}
    run = make(always_fails, retry=retry(None, **times))
    for attempt in (1, 2, 3, 4):
        report = run()
        assert_run(report, failed=1, to_retry=1)
        assert report.failures[0].attempts == f" (attempt {attempt}, again in 3600 s)"
        row = Dispatch.objects.annotate(now=DatabaseNow()).get()
        assert row.not_before is not None
        assert HOUR - 60 < (row.not_before - row.now).total_seconds() <= HOUR
        assert_run(run())
        Dispatch.objects.update(not_before=DatabaseNow() - timedelta(seconds=1))
    assert (column("tries"), column("status")) == ([4], ["queued"])


@each_way
def test_a_snooze_without_a_column_for_its_time_is_a_failure_that_says_so(make: Make) -> None:
    dispatches(2)

    def handle(row: Dispatch) -> None:
        raise Snooze(delay=60) if row.place else Snooze()

    run = make(handle, retry=retry())
    report = run()
    assert_run(report, failed=1, snoozed=1)
    assert "expected a Retry with next_attempt_at, the column" in str(report.failures[0].error)
    assert column("status") == ["queued"] * 2
    assert {tries or 0 for tries in column("tries")} == {0}  # neither costs an attempt
    assert_run(run(), failed=1, snoozed=1)


@pytest.mark.parametrize("values", [{"status": "failed"}, None], ids=["dead letter", "none"])
def test_a_function_as_dead_letter_is_asked_once_about_a_last_attempt_that_lapsed(
    values: dict[str, Any] | None,
) -> None:
    """And not about rows that it has left as they are."""
    dispatches(2, tries=1)
    lapsed = DatabaseNow() - timedelta(seconds=1)
    Dispatch.objects.filter(place=1).update(leased_until=lapsed)
    asked: list[int] = []

    def failed(row: Dispatch, error: Exception) -> dict[str, Any] | None:
        asked.append(row.place)
        return values

    calls: list[int] = []
    run = MAKERS["at_least_once"](counting(calls), retry=retry(1), failed=failed)
    report = run()
    assert_run(report, failed=1)
    assert type(report.failures[0].error) is AttemptsUsedUp
    assert_run(run())
    assert (asked, calls) == ([1], [])
    assert column("status") == ["queued", values["status"] if values else "queued"]
    assert (column("tries"), column("leased_until")) == ([1, 1], [None] * 2)


@each_way
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_without_attempts_left_get_the_dead_letter_and_no_call(
    make: Make, batch_size: int
) -> None:
    dispatches(3, tries=3)
    calls: list[int] = []
    options: dict[str, Any] = {"retry": retry(3), "failed": {"status": "failed"}}
    report = make(counting(calls), batch_size=batch_size, **options)()
    assert_run(report, failed=3)
    assert {type(failure.error) for failure in report.failures} == {AttemptsUsedUp}
    assert calls == []
    assert (column("status"), column("tries")) == (["failed"] * 3, [3] * 3)
