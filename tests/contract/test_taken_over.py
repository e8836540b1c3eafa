"""``taken_over()``: called before the handler of a row whose last worker did not settle it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from dcl_processor import BatchProcessor, Delivery, Discard, Lease, Snooze
from dcl_processor.exceptions import InvalidOption
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def left_behind(row: Errand) -> None:
    """Leave the lease of a worker that died an hour ago."""
    before = timezone.now() - timedelta(hours=1)
    Errand.objects.filter(pk=row.pk).update(leased_until=before, attempts=1)


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
    ("error", "counts"),
    [
        (Discard("it was uploaded"), {"discarded": 1}),
        (Snooze(), {"snoozed": 1}),
        (ValueError("no answer"), {"failed": 1}),
    ],
    ids=["discard", "snooze", "failure"],
)
def test_what_it_raises_is_the_outcome_of_the_row(error: Exception, counts: Any) -> None:
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
    assert not the.state(rows[0])["leased_until"]


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
