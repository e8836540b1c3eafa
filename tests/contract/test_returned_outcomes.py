"""An exception that a user's function returns stands for the same outcome as one that it raises."""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor import Discard, Snooze
from dcl_processor.observers import Handling, Observer
from tests.contract.support import errands as the
from tests.contract.support.onlookers import looking_on
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import retrying
from tests.contract.test_snooze_discard import CLAIM, LEASE
from tests.contract.test_taken_over import left_behind
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

OUTCOMES = pytest.mark.parametrize(
    ("returned", "counts"),
    [
        (Snooze("not yet"), {"snoozed": 1}),
        (Discard("never"), {"discarded": 1}),
        (ValueError, {"failed": 1, "to_retry": 1}),
    ],
    ids=["snooze", "discard", "error"],
)


@OUTCOMES
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_what_taken_over_returns(is_async: bool, returned: Any, counts: Any) -> None:
    [row] = the.errands(1)
    left_behind(row)
    calls: list[Any] = []

    async def handle_async(row: Errand) -> None:
        calls.append(row.place)

    handler = handle_async if is_async else lambda row: calls.append(row.place)
    options: dict[str, Any] = {"retry": the.retry(), "failed": {"dead": True}}
    run = the.at_least_once(handler, taken_over=lambda row: returned, **options)
    assert_run(run(), **counts)
    assert calls == []


def give_up(rows: list[Errand]) -> Any:
    return Discard("no such customer")


async def give_up_later(rows: list[Errand]) -> Any:
    return give_up(rows)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (give_up, {}),
        *((each, kind) for each in (give_up, give_up_later) for kind in (LEASE, CLAIM)),
    ],
)
def test_what_a_call_for_many_rows_returns_for_all_of_them(
    batch: Any, options: dict[str, Any]
) -> None:
    the.errands(3)
    given = {"failed": {"dead": True}, "reset": {"dead": False}, **options}
    run = retrying(the.ignore, process_batch=batch, batch_size=10, **given)
    assert_run(run(), discarded=3, redone=0 if options == CLAIM else 3)
    assert Errand.objects.filter(dead=True, last_error="Discard: no such customer").count() == 3


@OUTCOMES
def test_what_a_reservation_is_settled_with(returned: Any, counts: Any) -> None:
    the.errands(1)
    run = the.at_least_once(the.ignore, retry=the.retry(), failed={"dead": True})
    [one] = run.reserve(limit=1)
    one.settle(returned)
    row = Errand.objects.get()
    assert (row.done, row.dead) == (False, "discarded" in counts)
    assert row.attempts == (0 if "snoozed" in counts else 1)


def test_what_an_observer_sees_of_it() -> None:
    the.errands(1)
    seen: list[Any] = []

    class Looking(Observer):
        def handler_ended(self, handling: Handling, error: BaseException | None) -> None:
            seen.append(error)

    returned = ValueError("no answer")
    with looking_on(Looking()):
        assert_run(the.transactional(lambda row: returned)(), failed=1)
    assert seen == [returned]


@pytest.mark.parametrize("options", [{}, LEASE], ids=["transactional", "lease"])
def test_a_list_that_is_too_short_is_an_error_that_names_both_lengths(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The call may have done its work, and the rows are handled once more."""
    the.errands(3)
    calls: list[int] = []

    def handle(rows: list[Errand]) -> Any:
        calls.append(len(rows))
        return [None] * min(len(rows), 2)

    run = retrying(the.ignore, process_batch=handle, batch_size=10, **options)
    report = run()
    assert_run(report, processed=3, redone=3)
    assert "3 processed, 3 redone" in str(report)
    assert calls == [3, 1, 1, 1]
    [line] = [each for each in caplog.records if each.levelname == "ERROR"]
    assert line.name == "dcl_processor.operations"  # which the command shows in any case
    assert "one result for each of 3 rows, got 2" in line.getMessage()
