"""A handler that calls ``sys.exit()``: its row's failure, under each delivery and over runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from django.db.models import QuerySet

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import HandlerExited
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)


def at_most_once(handler: Callable[..., Any], **options: Any) -> BatchProcessor[Errand]:
    return the.at_most_once(handler, reset={"claimed": False}, **options)


MAKE = [the.transactional, at_most_once, the.at_least_once]


@pytest.mark.parametrize("way", [{"batch_size": 1}, {"batch_size": 4}, {"concurrency": 3}], ids=str)
@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
def test_it_costs_the_others_nothing_and_counts_as_an_attempt(make: Any, way: Any) -> None:
    rows = the.errands(10)
    calls: Counter[int] = Counter()

    def handle(row: Errand) -> None:
        calls[row.place] += 1
        if row.place == 2:
            sys.exit(0)

    size, concurrency = way.get("batch_size", 1), way.get("concurrency", 1)
    processor = make(handle, retry=the.retry(), failed={"dead": True}, batch_size=size)
    reports = [processor(concurrency=concurrency) for _ in range(4)]
    first, second, third, fourth = reports
    assert_run(first, processed=9, failed=1, retried=1)
    assert_run(second, failed=1, retried=1)
    assert_run(third, failed=1)
    assert_run(fourth)
    assert isinstance(reports[0].failures[0].error, HandlerExited)
    # Given up after as many attempts as it may have.
    assert calls == Counter({place: 3 if place == 2 else 1 for place in range(10)})
    said = the.state(rows[2])
    assert (said["done"], said["dead"], said["attempts"]) == (False, True, 3)
    assert "SystemExit(0)" in Errand.objects.get(pk=rows[2].pk).last_error
    assert all(the.state(row)["done"] for row in rows if row.place != 2)


def test_in_a_batch_handler_the_rows_are_redone_one_by_one() -> None:
    rows = the.errands(6)
    calls: list[list[int]] = []

    class Together(BatchProcessor[Errand]):
        done = {"done": True}
        batch_size = 3

        def pending(self) -> QuerySet[Errand]:
            return the.PENDING.all()

        def process_batch(self, rows: Sequence[Errand], /, *_: Any) -> None:
            calls.append([row.place for row in rows])
            if any(row.place == 1 for row in rows):
                sys.exit(2)

    report = Together()()
    assert_run(report, processed=5, failed=1)
    assert calls == [[0, 1, 2], [0], [1], [2], [3, 4, 5]]
    assert [the.state(row)["done"] for row in rows] == [True, False, True, True, True, True]


@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.__name__)
def test_in_a_done_function_it_is_the_rows_failure_too(make: Any) -> None:
    rows = the.errands(3)

    def done(row: Errand, _: Any) -> dict[str, Any]:
        return sys.exit(1) if row.place == 1 else {"done": True}

    report = make(the.ignore, done=done)()
    assert_run(report, processed=2, failed=1)
    assert [the.state(row)["done"] for row in rows] == [True, False, True]


def test_a_resource_that_exits_while_it_is_opened_charges_no_row() -> None:
    (row,) = the.errands(1)
    report = the.transactional(lambda row, resource: None, resource=lambda: sys.exit(2))()
    assert_run(report, stopped="failures")
    assert not report.ok
    assert isinstance(report.error, SystemExit)
    assert the.untouched(row)
