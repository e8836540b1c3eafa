"""``taken_over()``: called before the handler of a row whose last worker did not settle it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Discard, Lease, Snooze
from dcl_processor.engine import heartbeat
from dcl_processor.exceptions import InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.clocks import HOUR, Clock
from tests.contract.support.marking import marking
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def left_behind(row: Errand) -> None:
    """Leave the lease of a worker that died an hour ago."""
    before = timezone.now() - timedelta(hours=1)
    Errand.objects.filter(pk=row.pk).update(leased_until=before, attempts=1)


def shows_the_death(row: Errand) -> bool:
    """Tell whether the row shows the next worker that another one had it, and is free."""
    return Errand.objects.get(pk=row.pk).leased_until == Lease(60).taken_away


@pytest.mark.parametrize("size", [1, 10])
def test_it_is_called_before_the_handler_of_that_row_alone(size: int) -> None:
    rows = the.errands(3)
    left_behind(rows[1])
    calls: list[Any] = []
    run = the.at_least_once(
        lambda row: calls.append(row.place),
        taken_over=lambda row: calls.append(("taken over", row.place)),
        batch_size=size,
    )
    assert_run(run(), processed=3)
    assert calls == [0, ("taken over", 1), 1, 2]


def test_a_row_that_was_put_back_is_not_taken_over() -> None:
    the.errands(1)
    calls: list[Any] = []

    def fail(row: Errand) -> None:
        raise ValueError

    options = {"retry": the.retry(), "taken_over": calls.append}
    assert_run(the.at_least_once(fail, **options)(), failed=1, retried=1)
    assert_run(the.at_least_once(the.ignore, **options)(), processed=1)
    assert calls == []


@pytest.mark.parametrize(
    ("error", "counts", "is_settled"),
    [
        (Discard("it was uploaded"), {"discarded": 1}, True),
        (Snooze(), {"snoozed": 1}, False),
        (ValueError("no answer"), {"failed": 1}, True),
    ],
    ids=["discard", "snooze", "failure"],
)
def test_what_it_raises_is_the_outcome_of_the_row(
    error: Exception, counts: Any, is_settled: bool
) -> None:
    rows = the.errands(1)
    left_behind(rows[0])
    calls: list[Any] = []

    def look(row: Errand) -> None:
        raise error

    def handle(row: Errand) -> None:
        calls.append(row.place)

    run = the.at_least_once(handle, taken_over=look, failed={"dead": True})
    assert_run(run(), **counts)
    assert calls == []
    said = the.state(rows[0])
    assert (said["dead"], said["leased_until"]) == (is_settled, not is_settled)


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
def test_a_row_whose_lease_lapses_during_it_is_not_handled(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was suspended: another worker may have the row by now."""
    taken, other = the.errands(2)
    left_behind(taken)
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    calls: list[Any] = []

    def look(row: Errand) -> None:
        calls.append(("taken over", row.place))
        clock.passed = HOUR

    async def handle_async(row: Errand) -> None:
        calls.append(row.place)

    handler = handle_async if is_async else lambda row: calls.append(row.place)
    run = the.at_least_once(handler, taken_over=look)
    assert_run(run(filter=the.only(taken)), lease_lost=1)
    assert calls == [("taken over", taken.place)]
    assert shows_the_death(taken)
    clock.passed = 0
    assert_run(run(filter=the.only(other)), processed=1)


NOT_NOW = [
    (Snooze(), {"retry": the.retry()}, {"snoozed": 1}, 1),
    (Snooze(), {}, {"snoozed": 1}, 1),
    (Snooze(delay=60), {}, {"failed": 1}, 1),
    (ValueError(), {"retry": the.retry()}, {"failed": 1, "retried": 1}, 2),
    (ValueError(), {}, {"failed": 1}, 1),
    (ValueError(), {"get_failed": lambda row, error: {}}, {"failed": 1}, 1),
    (Discard("no"), {}, {"failed": 1}, 1),
    (Discard("no"), {"retry": the.retry()}, {"failed": 1}, 2),
]


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize("make", [the.at_least_once, marking], ids=["lease", "mark"])
@pytest.mark.parametrize(("error", "options", "counts", "attempts"), NOT_NOW)
def test_it_is_called_again_if_the_row_stays_pending_by_what_it_raises(
    make: the.Make,
    error: Exception,
    options: dict[str, Any],
    counts: Any,
    attempts: int,
    is_async: bool,
) -> None:
    """Nothing was found out about the worker that died."""
    [row] = the.errands(1)
    left_behind(row)
    calls: list[str] = []

    def look(row: Errand) -> None:
        calls.append("taken over")
        if calls == ["taken over"]:
            raise error

    def handle(row: Errand) -> None:
        calls.append("handled")

    async def handle_async(row: Errand) -> None:
        handle(row)

    options = {"retry": None, "taken_over": look, **options}
    run = make(handle_async if is_async else handle, **options)
    assert_run(run(), **counts)
    assert calls == ["taken over"]
    assert shows_the_death(row)
    said = the.state(row)
    assert (said["attempts"], said["claimed"], said["claimed_at"]) == (attempts, False, False)
    assert_run(run(), processed=1)
    assert calls == ["taken over", "taken over", "handled"]
    assert not the.state(row)["leased_until"]


def test_a_row_that_it_snoozes_waits_until_then() -> None:
    [row] = the.errands(1)
    left_behind(row)

    def look(row: Errand) -> None:
        raise Snooze(delay=60)

    run = the.at_least_once(the.ignore, taken_over=look, retry=the.retry())
    assert_run(run(), snoozed=1)
    assert_run(run())
    assert shows_the_death(row)
    Errand.objects.update(next_attempt_at=timezone.now())
    assert_run(run(), snoozed=1)


@pytest.mark.parametrize("size", [1, 3])
def test_what_the_handler_raises_after_it_removes_what_showed_the_death(size: int) -> None:
    """The handler was called, so that this worker's attempt is the last one."""
    rows = the.errands(2)
    for row in rows:
        left_behind(row)

    def handle(row: Errand) -> None:
        raise Snooze if row.place else ValueError

    run = the.at_least_once(handle, taken_over=the.ignore, retry=the.retry(), batch_size=size)
    assert_run(run(), failed=1, retried=1, snoozed=1)
    assert not any(the.state(row)["leased_until"] for row in rows)


def test_a_row_whose_last_attempt_ends_in_it_is_given_up_on_for_good() -> None:
    [row] = the.errands(1)
    left_behind(row)
    calls: list[int] = []

    def look(row: Errand) -> None:
        calls.append(row.pk)
        raise ValueError

    options = {"retry": the.retry(max_attempts=2), "get_failed": lambda row, error: {}}
    run = the.at_least_once(the.ignore, taken_over=look, **options)
    assert_run(run(), failed=1)
    assert not the.state(row)["leased_until"]
    assert_run(run())
    assert len(calls) == 1


def test_what_another_function_than_a_plain_one_returns_fails_the_row() -> None:
    [row] = the.errands(1)
    left_behind(row)

    def look(row: Errand) -> Any:
        return look_async(row)

    run = the.at_least_once(the.ignore, taken_over=look)
    report = run()
    assert_run(report, failed=1)
    assert "got a coroutine that is never run" in str(report.failures[0].error)
    assert shows_the_death(row)


@pytest.mark.parametrize("is_async", [False, True])
def test_asynchronous_handlers_have_it_too(is_async: bool) -> None:
    rows = the.errands(3)
    left_behind(rows[2])
    calls: list[Any] = []

    async def handle(row: Errand) -> None:
        calls.append(row.place)

    async def look_async(row: Errand) -> None:
        calls.append(("taken over", row.place))

    def look(row: Errand) -> None:
        calls.append(("taken over", row.place))

    run = the.at_least_once(handle, taken_over=look_async if is_async else look)
    assert_run(run(), processed=3)
    assert calls == [0, 1, ("taken over", 2), 2]


class Upload(BatchProcessor[Errand]):
    """The spelling as a class."""

    delivery = Delivery.AT_LEAST_ONCE
    lease = Lease(60)
    done = {"done": True}

    def pending(self) -> Any:
        return the.PENDING

    def process(self, row: Errand, /) -> None:
        row.result += "handled"
        Errand.objects.filter(pk=row.pk).update(result=row.result)

    def taken_over(self, row: Errand, /) -> None:
        row.result = "taken over, "


def test_a_class_writes_it_as_a_method() -> None:
    rows = the.errands(2)
    left_behind(rows[0])
    assert_run(Upload()(), processed=2)
    assert [the.state(row)["result"] for row in rows] == ["taken over, handled", "handled"]


def test_a_row_without_attempts_left_is_given_up_on_without_it() -> None:
    rows = the.errands(1)
    left_behind(rows[0])
    Errand.objects.filter(pk=rows[0].pk).update(attempts=3)
    calls: list[Any] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)

    options = {"failed": {"dead": True}, "retry": the.retry()}
    run = the.at_least_once(handle, taken_over=handle, **options)
    assert_run(run(), failed=1)
    assert calls == []


async def look_async(row: Errand) -> None:
    """Look."""


@pytest.mark.parametrize(
    ("make", "hook", "words"),
    [
        (the.transactional, the.ignore, "no taken_over with TRANSACTIONAL, whose rows have no"),
        (the.at_most_once, the.ignore, "no taken_over with AT_MOST_ONCE, whose rows have no"),
        (the.at_least_once, lambda: None, "taken_over to be a function of one row"),
        (the.at_least_once, 7, "taken_over to be a function of one row, got 7"),
        (the.at_least_once, look_async, "taken_over to be a plain function, as the handler is"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(make: the.Make, hook: Any, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        make(the.ignore, taken_over=hook)
