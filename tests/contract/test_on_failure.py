"""``Retry(on_failure=…)``: what is written at every failure, and at nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from django.db.models import F, Q

from dcl_processor import Discard, Snooze
from dcl_processor.clock import DatabaseNow
from dcl_processor.exceptions import AttemptsUsedUp, InvalidDone, StillPending
from tests.contract.support import dispatches as the
from tests.contract.support.batches import statements
from tests.contract.support.messages import updates
from tests.contract.support.reports import assert_run
from tests.models import Dispatch

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

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
        assert_run(run(), failed=3, retried=3)
        assert (the.column("status"), the.column("tries")) == (["deferred"] * 3, [attempt] * 3)
        assert the.column("priority") == [10 * attempt + place for place in range(3)]
    assert_run(run(), failed=3)
    assert (the.column("status"), the.column("tries")) == (["failed"] * 3, [3] * 3)
    assert the.column("priority") == [30, 31, 32]
    assert the.column("leased_until") == the.column("claimed_at") == [None] * 3


@the.each_way
def test_it_is_one_statement_with_the_attempt(make: the.Make) -> None:
    the.dispatches(1)
    with statements() as seen:
        make(the.always_fails, retry=the.retry(on_failure=DEFERRED))()
    # The rehearsal writes the values, too, before the handler is called.
    noted = [sql for sql in seen if updates(sql) and "priority" in sql]
    written = noted[-1].partition(" SET ")[2].partition(" WHERE ")[0]
    assert "tries" in written or make is the.at_least_once
    after = seen[seen.index(noted[-1]) + 1 :]
    assert not any(updates(sql) for sql in after)
    row = Dispatch.objects.get()
    assert (row.tries, row.status, row.priority) == (1, "deferred", 10)


@the.each_way
def test_a_callable_is_called_for_each_failure(make: the.Make) -> None:
    the.dispatches(2)
    numbers: Iterator[int] = count(1)
    on_failure = {"status": "deferred", "many_tries": lambda: next(numbers)}
    run = make(the.always_fails, retry=the.retry(9, on_failure=on_failure))
    run()
    first = the.column("many_tries")
    run()
    second = the.column("many_tries")
    assert len({*first, *second}) == 4


@the.each_way
def test_it_is_not_written_for_a_snoozed_or_a_discarded_row(make: the.Make) -> None:
    the.dispatches(2)

    def handle(row: Dispatch) -> None:
        raise Discard("never") if row.place else Snooze()

    report = make(handle, retry=the.retry(on_failure=DEFERRED), failed=FAILED)()
    assert_run(report, snoozed=1, discarded=1)
    assert (the.column("status"), the.column("priority")) == (["queued", "failed"], [0, 0])


@the.each_way
def test_a_success_leaves_its_columns_to_done(make: the.Make) -> None:
    the.dispatches(1, status="deferred", priority=7, tries=2)
    assert_run(make(lambda row: None, retry=the.retry(on_failure=DEFERRED))(), processed=1)
    row = Dispatch.objects.get()
    assert (row.status, row.priority, row.tries) == ("sent", 7, 0)


@the.each_way
def test_requeue_leaves_its_columns_to_reset(make: the.Make) -> None:
    the.dispatches(1)
    retry, reset = the.retry(1, on_failure=DEFERRED), {"status": "queued"}
    run = make(the.always_fails, retry=retry, failed=FAILED, reset=reset)
    assert_run(run(), failed=1)
    assert run.requeue(Dispatch.objects.all()) == 1
    row = Dispatch.objects.get()
    assert (row.status, row.priority, row.tries) == ("queued", 10, 0)


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


@the.each_way
def test_a_name_that_is_no_column_is_refused(make: the.Make) -> None:
    the.dispatches(1)
    with pytest.raises(InvalidDone, match=r"expected on_failure to name columns of tests\.Disp"):
        make(not_to_be_called, retry=the.retry(on_failure={"state": "deferred"}))()


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
    assert_run(run(), failed=1, retried=1)
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


def together(rows: list[Dispatch]) -> list[Any]:
    return [OSError("no answer") if row.place else None for row in rows]


def test_it_is_written_to_the_rows_of_a_batch_that_were_refused() -> None:
    the.dispatches(3)
    retry = the.retry(on_failure=DEFERRED)
    run = the.transactional(the.always_fails, retry=retry, process_batch=together, batch_size=3)
    assert_run(run(), processed=1, failed=2, retried=2)
    assert the.column("status") == ["sent", "deferred", "deferred"]
    assert the.column("priority") == [0, 10, 10]
