"""Outcomes that are no failures, and what puts a row back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.models import QuerySet

from dcl_processor import Delivery, Discard, Lease, Retry, Snooze
from dcl_processor.exceptions import InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import HOUR, delay, retrying
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(params=[1, 10])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.mark.parametrize(
    ("snooze", "seconds"),
    [
        (Snooze("later", delay=300), 300),
        (Snooze("later", delay=timedelta(minutes=2)), 120),
        (Snooze("later"), HOUR),
    ],
    ids=["seconds", "timedelta", "backoff"],
)
def test_a_snoozed_row_waits_and_has_lost_no_attempt(
    snooze: Snooze, seconds: int, batch_size: int
) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(result="worked")
        if row.place == 1:
            raise snooze

    run = retrying(handle, batch_size=batch_size)
    report = run()
    assert_run(report, processed=1, snoozed=1)
    assert report.ok
    row = Errand.objects.get(place=1)
    assert (row.done, row.attempts, row.last_error, row.result) == (False, 0, "", "")
    assert seconds - 60 < delay(1) <= seconds
    assert_run(run())


def test_a_row_may_be_snoozed_until_a_time() -> None:
    the.errands(1)
    until = datetime(2100, 1, 1, tzinfo=UTC)
    assert_run(retrying(the.raising(Snooze(until=until)))(), snoozed=1)
    assert Errand.objects.get().next_attempt_at == until


def test_a_discarded_row_gets_the_dead_letter_at_once_and_is_no_failure(batch_size: int) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        Errand.objects.filter(pk=row.pk).update(result="worked")
        if row.place == 1:
            raise Discard("no such customer")

    report = retrying(handle, failed={"dead": True}, batch_size=batch_size)()
    assert_run(report, processed=1, discarded=1)
    assert report.ok
    row = Errand.objects.get(place=1)
    assert (row.dead, row.done, row.attempts, row.result) == (True, False, 1, "")
    assert row.last_error == "Discard: no such customer"


@pytest.mark.parametrize("retry", [None, Retry(backoff=HOUR)], ids=["alone", "retry"])
def test_discard_without_a_dead_letter_is_a_failure_that_says_so(retry: Retry | None) -> None:
    the.errands(2)

    def handle(row: Errand) -> None:
        if row.place == 0:
            raise Discard("never")

    report = retrying(handle, retry=retry)()
    assert_run(report, processed=1, failed=1)
    assert isinstance(report.failures[0].error, InvalidOption)
    assert "expected failed=" in str(report.failures[0].error)
    assert Errand.objects.get(place=0).done is False


def test_requeue_makes_rows_as_if_they_had_never_been_tried() -> None:
    the.errands(3)
    bad = {1, 2}

    def handle(row: Errand) -> None:
        if row.place in bad:
            raise ValueError("bad")

    run = retrying(
        handle, retry=Retry(max_attempts=1), failed={"dead": True}, reset={"dead": False}
    )
    assert_run(run(), processed=1, failed=2)
    dead: QuerySet[Errand, Errand] = Errand.objects.filter(dead=True, place=1)
    assert run.requeue(dead) == 1
    row = Errand.objects.get(place=1)
    assert (row.attempts, row.next_attempt_at, row.last_error, row.dead) == (0, None, "", False)
    assert Errand.objects.get(place=2).dead
    bad.clear()
    assert_run(run(), processed=1)
    assert Errand.objects.filter(done=True).count() == 2


@pytest.mark.parametrize("until", [None, datetime(2999, 1, 1, tzinfo=UTC)])
def test_a_snooze_with_a_time_and_no_column_for_it_is_a_failure_that_says_so(
    until: datetime | None,
) -> None:
    [row] = the.errands(1)

    def handle(row: Errand) -> None:
        raise Snooze("later", until=until) if until else Snooze("later", delay=60)

    report = the.at_least_once(handle)()
    assert_run(report, failed=1)
    assert "expected retry=Retry(…), whose column stores the time" in str(report.failures[0].error)
    assert the.untouched(row)


def test_a_claimed_row_that_is_snoozed_is_put_back() -> None:
    [row] = the.errands(1)
    report = the.at_most_once(the.raising(Snooze("later")), reset={"claimed": False})()
    assert_run(report, snoozed=1)
    assert the.untouched(row)


def test_a_claimed_row_that_nothing_puts_back_cannot_be_snoozed() -> None:
    [row] = the.errands(1)
    report = the.at_most_once(the.raising(Snooze("later")))()
    assert_run(report, failed=1)
    assert "got none, so the row stays claimed" in str(report.failures[0].error)
    assert the.state(row)["claimed"] is True


LEASE: dict[str, Any] = {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)}
CLAIM: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "reset": {"claimed": False},
}
RETURNED = [Snooze(delay=60), Discard("never"), ValueError("no"), Snooze, "a result"]


def return_it(row: Errand) -> Any:
    Errand.objects.filter(pk=row.pk).update(result="worked")
    return RETURNED[row.place]


async def return_it_later(row: Errand) -> Any:
    return RETURNED[row.place]


def return_them(rows: list[Errand]) -> Any:
    return [RETURNED[row.place] for row in rows]


async def return_them_later(rows: list[Errand]) -> Any:
    return return_them(rows)


@pytest.mark.parametrize(
    ("handler", "options", "concurrency"),
    [
        (return_it, {}, 1),
        (return_it, {"batch_size": 10}, 1),
        *((return_it, kind, concurrency) for kind in (LEASE, CLAIM) for concurrency in (1, 2)),
        *((return_it_later, kind, 2) for kind in (LEASE, CLAIM)),
        *((the.ignore, {**kind, "process_batch": return_them}, 1) for kind in ({}, LEASE, CLAIM)),
        *((the.ignore, {**kind, "process_batch": return_them_later}, 1) for kind in (LEASE, CLAIM)),
    ],
)
def test_an_exception_that_is_returned_is_the_outcome(
    handler: Any, options: dict[str, Any], concurrency: int
) -> None:
    """As a result it would flip its row: a mail would be lost by "return" for "raise"."""
    the.errands(5)
    if "process_batch" in options:
        options = {"batch_size": 10, **options}
    run = retrying(handler, **{"reset": {"done": False}, "failed": {"dead": True}, **options})
    report = run(concurrency=concurrency)
    assert_run(report, processed=1, snoozed=2, discarded=1, failed=1, to_retry=1)
    assert Errand.objects.get(done=True).place == 4
    assert Errand.objects.get(dead=True).place == 1
    if handler is return_it and "delivery" not in options:
        assert Errand.objects.get(result="worked").place == 4  # the work of the others is undone


# --- ``failed``: what is written to a row that is given up on


def fails_at_one(row: Errand) -> None:
    Errand.objects.filter(pk=row.pk).update(result="worked")
    if row.place == 1:
        raise ValueError("no such address")


@the.all_deliveries
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("failed", [{"dead": True}, lambda row, error: {"dead": True}], ids=repr)
def test_without_retry_the_first_failure_is_the_last(make: Any, size: int, failed: Any) -> None:
    rows = the.errands(3)
    report = make(fails_at_one, failed=failed, batch_size=size)()
    assert_run(report, processed=2, failed=1)
    said = the.state(rows[1])
    assert (said["dead"], said["done"]) == (True, False)
    assert (said["leased_until"], said["claimed_at"]) == (False, False)
    assert [the.state(row)["done"] for row in rows] == [True, False, True]
    assert_run(make(fails_at_one, failed=failed)())


@the.all_deliveries
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


@the.all_deliveries
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
