"""``max_failures``: so many failed rows, one after the other or not, end a run."""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor import Discard, Snooze
from dcl_processor.exceptions import InvalidOption
from dcl_processor.execution.handler import Failed, Handled
from dcl_processor.runner.streak import Streak
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.shared"
MAKES = [the.transactional, the.at_most_once, the.at_least_once]
each_delivery = pytest.mark.parametrize("make", MAKES)


def every_third_fails(row: Errand) -> None:
    if row.place % 3 == 0:
        raise ValueError(row.place)


@pytest.mark.parametrize("size", [1, 4, 100])
@each_delivery
def test_failures_with_successes_between_them_end_a_run(make: the.Make, size: int) -> None:
    rows = the.errands(12)
    report = make(every_third_fails, batch_size=size)(max_failures=3)
    assert_run(report, processed=4, failed=3, stopped="failures")
    assert not report.ok
    assert all(the.untouched(row) for row in rows[7:])


def test_a_run_with_fewer_failures_goes_to_its_end() -> None:
    the.errands(12)
    report = the.transactional(every_third_fails)(max_failures=5)
    assert_run(report, processed=8, failed=4)


def test_a_success_that_is_counted_after_the_last_failure_does_not_let_the_run_go_on() -> None:
    """Both were in flight, and are counted together."""
    streak = Streak(the.transactional(the.ignore), 1)
    streak.note(Failed(ValueError()))
    streak.note(Handled())
    assert streak.ends_the_run


def test_threads_finish_the_rows_in_flight() -> None:
    the.errands(40)
    report = the.transactional(every_third_fails)(max_failures=2, concurrency=4)
    assert report.stopped == "failures"
    assert 2 <= report.failed <= 2 + 4 * 2
    assert report.processed + report.failed < 40


def test_only_failed_rows_count() -> None:
    the.errands(6)

    def handle(row: Errand) -> None:
        match row.place:
            case 0 | 1:
                raise Snooze
            case 2 | 3:
                raise Discard("never")
            case 4:
                raise ValueError

    run = the.transactional(handle, failed={"dead": True}, retry=the.retry())
    assert_run(run(max_failures=2), processed=1, failed=1, retried=1, snoozed=2, discarded=2)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "2"])
def test_a_number_that_cannot_be_is_refused(given: Any) -> None:
    with pytest.raises(InvalidOption, match="max_failures to be a whole number of rows from 1"):
        the.transactional(the.ignore)(max_failures=given)
