"""Celery's soft time limit, raised into a run: it ends the run, and is no row's failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connection

from dcl_processor import BatchProcessor
from tests.contract.support.errands import (
    at_least_once,
    at_most_once,
    errands,
    ignore,
    retry,
    state,
    transactional,
    untouched,
)
from tests.contract.support.messages import updates
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

Make = Callable[..., BatchProcessor[Errand]]


def all_again(make: Make, *, batch_size: int = 1) -> Callable[..., BatchProcessor[Errand]]:
    def processor(handler: Callable[..., Any]) -> BatchProcessor[Errand]:
        options: dict[str, Any] = {"failed": {"dead": True}, "retry": retry(max_attempts=1)}
        if make is at_most_once:
            options["reset"] = {"claimed": False}
        return make(handler, **options, batch_size=batch_size)

    return processor


EACH = pytest.mark.parametrize(
    "make", [transactional, at_most_once, at_least_once], ids=lambda make: make.__name__
)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [
        each.getMessage() for each in caplog.records if "row" in each.getMessage().split()
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
@EACH
def test_in_a_handler_it_ends_the_run_and_is_no_failure_of_the_row(
    make: Make, batch_size: int, logged: Callable[[], list[str]]
) -> None:
    rows = errands(4)
    calls: list[int] = []

    def handle(row: Errand) -> None:
        calls.append(row.place)
        if row.place == 1:
            raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded):
        all_again(make, batch_size=batch_size)(handle)()
    assert calls == [0, 1]
    # As after a kill: a batch of one transaction goes as a whole, and a lease lapses.
    whole_batch = make is transactional and batch_size > 1
    assert state(rows[0])["done"] is not whole_batch
    assert untouched(rows[1]) is (make is transactional)
    assert state(rows[1])["leased_until"] is (make is at_least_once)
    assert state(rows[1])["dead"] is False
    assert untouched(rows[2])
    assert untouched(rows[3])
    assert logged() == []
    assert not connection.in_atomic_block


@contextmanager
def time_is_up(
    when: Callable[[str], bool],
    error: type[BaseException] = SoftTimeLimitExceeded,
    *,
    times: int = 1,
    after: bool = False,
) -> Iterator[None]:
    """Raise the limit instead of the first statements for which it is time, or after them."""
    raised: list[str] = []

    def wrapper(execute: Callable[..., Any], sql: str, *args: Any) -> Any:
        if len(raised) < times and when(sql):
            raised.append(sql)
            if after:
                execute(sql, *args)
            raise error
        return execute(sql, *args)

    with connection.execute_wrapper(wrapper):
        yield
    assert raised, "expected such a statement, and there was none"


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, KeyboardInterrupt])
@EACH
def test_while_the_outcome_is_written_it_is_no_failure(
    make: Make, error: type[BaseException], logged: Callable[[], list[str]]
) -> None:
    rows = errands(2)
    handled: list[int] = []

    def settles(sql: str) -> bool:
        return bool(handled) and "UPDATE" in sql

    with pytest.raises(error), time_is_up(settles, error):
        all_again(make)(lambda row: handled.append(row.place))()
    assert handled == [0]
    # Outside a transaction the work cannot be undone, and so it is noted first.
    assert state(rows[0])["done"] is (make is not transactional)
    assert state(rows[0])["dead"] is False
    assert untouched(rows[1])
    assert logged() == []
    assert_run(all_again(make)(ignore)(), processed=2 if make is transactional else 1)


@pytest.mark.parametrize("make", [at_most_once, at_least_once])
def test_after_the_outcome_was_written_the_row_is_reported_as_processed(make: Make) -> None:
    """The write is repeated, finds nothing to write, and looks up what is there."""
    [row] = errands(1)
    handled: list[int] = []

    def settles(sql: str) -> bool:
        return bool(handled) and updates(sql)

    run = all_again(make)(lambda row: handled.append(row.place))
    interrupts = time_is_up(settles, KeyboardInterrupt, after=True)
    with pytest.raises(KeyboardInterrupt) as interrupted, interrupts:
        run()
    assert state(row)["done"] is True
    report = interrupted.value.report  # type: ignore[attr-defined]  # as documented
    assert_run(report, processed=1, stopped="signal")


def test_in_an_asynchronous_handler_it_ends_the_run_as_well() -> None:
    (row,) = errands(1)

    async def handle(_: Errand) -> None:
        raise SoftTimeLimitExceeded

    with pytest.raises(SoftTimeLimitExceeded):
        all_again(at_least_once)(handle)()
    assert (state(row)["leased_until"], state(row)["dead"]) == (True, False)
