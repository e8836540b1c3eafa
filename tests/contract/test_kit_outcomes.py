"""The test kit with rows that are expected to fail, to wait, or to need a resource."""

from __future__ import annotations

from typing import Any

import pytest

from dcl_processor import Discard, Snooze
from dcl_processor.testing import assert_settles, make_due
from tests.contract.support import errands as the
from tests.contract.support.heartbeat import HAS_ROW_LOCKS
from tests.contract.support.retries import retrying
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

RAISED: dict[str, Exception] = {
    "failed": ValueError("no address"),
    "snoozed": Snooze("not yet"),
    "discarded": Discard("no such customer"),
}


def raising(error: Exception | None) -> Any:
    def handle(row: Errand) -> None:
        if error is not None:
            raise error

    return retrying(handle, failed={"dead": True})


@pytest.mark.parametrize("outcome", RAISED)
def test_a_row_may_be_expected_not_to_be_processed(outcome: Any) -> None:
    [row] = the.errands(1)
    assert getattr(assert_settles(raising(RAISED[outcome]), row, outcome=outcome), outcome) == 1


def test_what_came_instead_is_named() -> None:
    one, two = the.errands(2)
    words = r"expected <Errand.*> \(key \d+\) to be snoozed, got a row that was processed\."
    with pytest.raises(AssertionError, match=words):
        assert_settles(raising(None), one, outcome="snoozed")
    words = "to be discarded, got a row that failed with ValueError: no address"
    with pytest.raises(AssertionError, match=words):
        assert_settles(raising(RAISED["failed"]), two, outcome="discarded")


def test_a_row_that_waits_is_made_due_for_its_next_attempt() -> None:
    [row] = the.errands(1)
    run = raising(RAISED["failed"])
    assert_settles(run, row, outcome="failed")
    with pytest.raises(AssertionError, match="a row that is pending and not due"):
        assert_settles(run, row, outcome="failed")
    make_due(run, row)
    assert_settles(run, row, outcome="failed")
    assert Errand.objects.get().attempts == 2


def test_a_leased_row_is_made_due_and_no_other_row_changes() -> None:
    row, other = the.errands(2)
    run = the.at_least_once(the.ignore)
    run.reserve(limit=2)
    before = the.state(other)
    make_due(run, row)
    assert_settles(run, row)
    assert the.state(other) == before


def test_the_handler_gets_the_tests_resource() -> None:
    [row] = the.errands(1)
    got: list[str] = []

    def connect() -> Any:
        raise AssertionError("expected no connection to the service")

    def handle(row: Errand, line: str) -> None:
        got.append(line)

    assert_settles(the.transactional(handle, resource=connect), row, resource="a fake line")
    assert got == ["a fake line"]


if HAS_ROW_LOCKS:

    @pytest.mark.django_db(transaction=False)
    def test_an_async_handler_that_misses_the_rows_of_a_test_case_gets_a_hint() -> None:
        row = Errand.objects.create()

        async def handle(row: Errand) -> None:
            await Errand.objects.aget(pk=row.pk)

        with pytest.raises(AssertionError, match=r"DoesNotExist.*: use TransactionTestCase"):
            assert_settles(the.at_least_once(handle), row)
