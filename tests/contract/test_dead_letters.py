"""``failed``: what is written to a row that is given up on, or why nothing is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from dcl_processor import Discard
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


each_way = pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])


def fails_at_one(row: Errand) -> None:
    Errand.objects.filter(pk=row.pk).update(result="worked")
    if row.place == 1:
        raise ValueError("no such address")


@each_way
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("failed", [{"dead": True}, lambda row, error: {"dead": True}], ids=repr)
def test_without_retry_the_first_failure_is_the_last(make: Any, size: int, failed: Any) -> None:
    rows = the.errands(3)
    report = make(fails_at_one, failed=failed, batch_size=size)()
    assert_run(report, processed=2, failed=1)
    said = the.state(rows[1])
    assert (said["dead"], said["done"], said["leased_until"]) == (True, False, False)
    assert [the.state(row)["done"] for row in rows] == [True, False, True]
    assert_run(make(fails_at_one, failed=failed)())


@each_way
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


@each_way
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
        report = make(fails_at_one, failed=wrong, batch_size=3, **options)()
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


@each_way
def test_a_flip_that_cannot_be_written_buries_no_row(make: Any) -> None:
    rows = the.errands(3)
    report = make(fails_at_one, failed={"dead": True}, done=lambda row, result: None)()
    # The second one is from a random place, and may be the one that fails.
    assert_run(report, failed=report.failed, stopped=report.stopped)
    handled = [row for row in rows if row.place != 1]
    assert not any(the.state(row)["dead"] for row in handled)
