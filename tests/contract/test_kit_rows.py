"""``assert_settles`` can fail, and says why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from dcl_processor import Discard, Retry, Snooze
from dcl_processor.testing import assert_settles, make_due
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.retries import retrying
from tests.contract.support.sessions import part_locked
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


# --- assert_settles


def complaint(make: Any, row: Any) -> AssertionError:
    with pytest.raises(AssertionError) as caught:
        assert_settles(make, row)
    assert str(caught.value).startswith(make.name)
    return caught.value


def test_a_row_that_was_no_candidate_is_told_why() -> None:
    finished, waiting, deleted = the.errands(3)
    later = timezone.now() + timedelta(hours=1)
    Errand.objects.filter(pk=finished.pk).update(done=True)
    Errand.objects.filter(pk=waiting.pk).update(next_attempt_at=later)
    Errand.objects.filter(pk=deleted.pk).delete()
    tried = the.transactional(the.ignore, retry=Retry(3))
    assert "got no attempt: it is not in pending: it is done" in str(complaint(tried, finished))
    assert "got no attempt: its next attempt is at " in str(complaint(tried, waiting))
    assert "got no attempt: it is not in the database" in str(complaint(tried, deleted))


@pytest.mark.parametrize("make", [the.transactional, the.at_most_once, the.at_least_once])
def test_what_a_handler_asserts_reaches_the_test_with_its_traceback(make: Any) -> None:
    [row] = the.errands(1)

    def handle(row: Errand) -> None:
        assert row.place == 99, "not this place"

    with pytest.raises(AssertionError, match="not this place") as caught:
        assert_settles(make(handle), row)
    [note] = caught.value.__notes__
    assert "in handle" in note


if HAS_ROW_LOCKS:

    def test_a_locked_row_is_told() -> None:
        [row] = the.errands(1)
        with part_locked(Errand, row.pk):
            said = str(complaint(the.transactional(the.ignore), row))
        assert "to be processed, got 1 skipped." in said
        assert_settles(the.transactional(the.ignore), row)


# --- rows that are expected to fail, to wait, or to need a resource


RAISED: dict[str, Exception] = {
    "failed": ValueError("no address"),
    "snoozed": Snooze("not yet"),
    "discarded": Discard("no such customer"),
}


def ending(error: Exception | None) -> Any:
    def handle(row: Errand) -> None:
        if error is not None:
            raise error

    return retrying(handle, failed={"dead": True})


@pytest.mark.parametrize("outcome", RAISED)
def test_a_row_may_be_expected_not_to_be_processed(outcome: Any) -> None:
    [row] = the.errands(1)
    assert getattr(assert_settles(ending(RAISED[outcome]), row, outcome=outcome), outcome) == 1


def test_what_came_instead_is_named() -> None:
    one, two = the.errands(2)
    words = r"expected <Errand.*> \(key \d+\) to be snoozed, got 1 processed\."
    with pytest.raises(AssertionError, match=words):
        assert_settles(ending(None), one, outcome="snoozed")
    words = "to be discarded, got 1 failed, ValueError: no address"
    with pytest.raises(AssertionError, match=words) as caught:
        assert_settles(ending(RAISED["failed"]), two, outcome="discarded")
    assert caught.value.__cause__ is RAISED["failed"]


def test_a_row_that_waits_is_made_due_for_its_next_attempt() -> None:
    [row] = the.errands(1)
    run = ending(RAISED["failed"])
    assert_settles(run, row, outcome="failed")
    with pytest.raises(AssertionError, match="its next attempt is at"):
        assert_settles(run, row, outcome="failed")
    make_due(run, row)
    assert_settles(run, row, outcome="failed")
    assert Errand.objects.get().attempts == 2


def test_a_leased_row_is_made_due_and_no_other_row_changes() -> None:
    row, other = the.errands(2)
    run = the.at_least_once(the.ignore)
    Errand.objects.update(leased_until=timezone.now() + timedelta(hours=1))
    before = the.state(other)
    make_due(run, row)
    assert_settles(run, row)
    assert the.state(other) == before


def test_the_handler_gets_the_tests_resource() -> None:
    [row] = the.errands(1)
    got: list[str] = []

    def connect() -> Any:
        raise AssertionError("expected no connection to the service")

    run = the.transactional(lambda row, line: got.append(line), resource=connect)
    assert_settles(run, row, resource="a fake line")
    assert got == ["a fake line"]
