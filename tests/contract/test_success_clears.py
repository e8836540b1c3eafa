"""A success clears the retry columns: each time a row becomes pending it has all its attempts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CLEARED = {"attempts": 0, "next_attempt_at": None, "last_error": ""}


RESET = {"reset": {"claimed": False}}
DELIVERIES: dict[str, Any] = {
    "transactional": the.transactional,
    "at most once": lambda handler, **options: the.at_most_once(handler, **RESET, **options),
    "at least once": the.at_least_once,
}
each_delivery = pytest.mark.parametrize("make", DELIVERIES.values(), ids=DELIVERIES)


def retry_columns(row: Errand) -> dict[str, Any]:
    columns: dict[str, Any] = Errand.objects.values(*CLEARED).get(pk=row.pk)
    return columns


def soil(rows: list[Errand]) -> None:
    """Make rows pending again, as an edit does to a "dirty" flag."""
    Errand.objects.filter(pk__in=[row.pk for row in rows]).update(done=False, claimed=False)


@each_delivery
def test_a_row_that_becomes_pending_again_and_again_is_handled_each_time(make: Any) -> None:
    rows = the.errands(3)
    handled: list[Any] = []
    run = make(lambda row: handled.append(row.pk), retry=the.retry(), failed={"dead": True})
    for _ in range(7):
        report = run()
        assert_run(report, processed=3)
        soil(rows)
    assert len(handled) == 21
    assert [retry_columns(row) for row in rows] == [CLEARED] * 3


@each_delivery
@pytest.mark.parametrize("size", [1, 3])
def test_failures_before_a_success_count_for_nothing_after_it(make: Any, size: int) -> None:
    rows = the.errands(3)
    left = 0

    def handle(row: Errand) -> None:
        if left and row.place > 0:
            raise ValueError("not yet")

    run = make(handle, retry=the.retry(), failed={"dead": True}, batch_size=size)
    for _ in range(4):
        for left in (2, 1, 0):  # noqa: B007  # the handler reads it
            report = run()
        assert_run(report, processed=2)
        assert [retry_columns(row) for row in rows] == [CLEARED] * 3
        soil(rows)
        assert not Errand.objects.filter(dead=True).exists()


def test_a_row_that_stays_pending_is_handled_in_every_run() -> None:
    """``repeats`` without ``failed``: used-up attempts would hide the row for good."""
    the.errands(2)
    run = the.at_least_once(the.ignore, done={"result": "seen"}, repeats=True, retry=the.retry())
    for _ in range(6):
        assert_run(run(), processed=2)


@pytest.mark.parametrize("make", [the.transactional, the.at_least_once])
def test_a_flip_of_the_handlers_own_clears_them_too(make: Any) -> None:
    rows = the.errands(2)
    failing = True

    def handle(row: Errand) -> None:
        if failing:
            raise ValueError
        Errand.objects.filter(pk=row.pk).update(done=True)

    run = make(handle, done=None, retry=the.retry())
    assert_run(run(), failed=2, retried=2)
    assert [retry_columns(row)["attempts"] for row in rows] == [1, 1]
    failing = False
    assert_run(run(), processed=2)
    assert [retry_columns(row) for row in rows] == [CLEARED] * 2


def test_values_of_the_users_own_win() -> None:
    """A project may keep the last error, or count attempts over all of a row's lives."""
    [row] = the.errands(1, attempts=2, last_error="ValueError")
    done = {"done": True, "last_error": "none"}
    assert_run(the.transactional(the.ignore, done=done, retry=the.retry())(), processed=1)
    assert retry_columns(row) == {**CLEARED, "last_error": "none"}


def test_rows_settled_by_a_person_have_all_their_attempts() -> None:
    run = the.at_most_once(the.ignore, retry=the.retry(), **RESET)
    rows = the.errands(2, claimed=True, attempts=3, last_error="ValueError")
    Errand.objects.update(claimed_at=rows[0].claimed_at or "2024-05-01T00:00:00Z")
    assert run.mark_done(Errand.objects.filter(pk=rows[0].pk)) == 1
    assert run.requeue(Errand.objects.filter(pk=rows[1].pk)) == 1
    assert [retry_columns(row) for row in rows] == [CLEARED] * 2
