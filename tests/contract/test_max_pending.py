"""``max_pending``: a run without a limit refuses a backlog that is larger than expected."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.db.models import Q
from django.test.utils import CaptureQueriesContext

from dcl_processor import BatchProcessor
from dcl_processor.candidates import scan
from dcl_processor.exceptions import ProcessorError, TooManyPending
from dcl_processor.signals import row_finished, run_finished
from tests.contract.support import errands as the
from tests.contract.support.parcels import UNSENT, parcels, processor
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import fail, retrying
from tests.models import Depot, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MAKE = {
    "transactional": the.transactional,
    "at_most_once": the.at_most_once,
    "at_least_once": the.at_least_once,
}


def never(row: Any) -> None:
    """Handle a row, which a run that refuses does not."""
    raise AssertionError(row)


def refused(run: BatchProcessor[Any], **parameters: Any) -> str:
    """Run, and return the sentence of the refusal; the last query of the run was a ``SELECT``."""
    with CaptureQueriesContext(connection) as queries, pytest.raises(TooManyPending) as caught:
        run(**parameters)
    assert all(query["sql"].startswith("SELECT") for query in queries)
    return str(caught.value)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_run_refuses_more_rows_than_that_and_handles_none(make: the.Make) -> None:
    rows = the.errands(4)
    run = make(never, max_pending=3)
    assert refused(run) == (
        f"{run.name}: expected at most max_pending=3 pending rows in a run without limit, got 4; "
        "pass limit=… (--limit) to handle some of them first, or raise max_pending."
    )
    assert all(the.untouched(row) for row in rows)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_run_handles_as_many_rows_as_that(make: the.Make) -> None:
    the.errands(3)
    assert_run(make(the.ignore, max_pending=3)(), processed=3)


def test_the_error_is_the_runs_and_not_the_definitions() -> None:
    assert issubclass(TooManyPending, ProcessorError)
    assert not issubclass(TooManyPending, ImproperlyConfigured)


def test_with_a_limit_it_handles_some_of_them_until_the_others_fit() -> None:
    parcels(5)
    run = processor(the.ignore, max_pending=3)
    assert_run(run(limit=1), processed=1, stopped="limit")
    assert "got 4;" in refused(run)
    assert_run(run(limit=0), stopped="limit")
    assert_run(run(limit=1), processed=1, stopped="limit")
    assert_run(run(), processed=3)


def test_rows_that_the_run_would_not_try_do_not_count() -> None:
    """Neither those outside its filter, nor those that wait for their next attempt."""
    parcels(5)
    run = processor(the.ignore, max_pending=3)
    assert_run(run(filter=Q(priority__gt=2)), processed=2)
    the.errands(4)
    waiting = retrying(fail, max_pending=3)
    assert "got 4;" in refused(waiting)
    assert_run(waiting(limit=2), processed=1, failed=1, retried=1, stopped="limit")
    assert_run(waiting(), processed=2)


def test_with_nothing_pending_a_run_is_one_select() -> None:
    with CaptureQueriesContext(connection) as queries:
        assert_run(processor(the.ignore, max_pending=1)())
    assert len(queries) == 1


def queries_of(run: BatchProcessor[Any]) -> int:
    parcels(scan.WINDOW + 1)
    with CaptureQueriesContext(connection) as queries:
        assert_run(run(), processed=scan.WINDOW + 1)
    return len(queries)


def test_it_costs_one_query_and_none_while_the_first_window_has_all_rows() -> None:
    asks = {"batch_size": scan.WINDOW + 1}
    parcels(1)
    processor(the.ignore)()  # which asks what a connection is asked once
    without = queries_of(processor(the.ignore, max_pending=None, **asks))
    assert queries_of(processor(the.ignore, max_pending=1_000, **asks)) == without + 1
    parcels(3)
    with CaptureQueriesContext(connection) as few:
        processor(the.ignore, max_pending=3, **asks)()
    parcels(3)
    with CaptureQueriesContext(connection) as as_few:
        processor(the.ignore, **asks)()
    assert len(few) == len(as_few)


@pytest.mark.parametrize("option", [{}, {"strict_order": True}], ids=["by key", "in order"])
def test_rows_behind_the_first_window_are_counted_up_to_ten_times_as_many(option: Any) -> None:
    parcels(scan.WINDOW + 3)
    ordered = processor(the.ignore, pending=UNSENT.order_by("-priority"), **option)
    ordered.max_pending = scan.WINDOW + 2
    assert f"got {scan.WINDOW + 3};" in refused(ordered)
    ordered.max_pending = 50
    with CaptureQueriesContext(connection) as queries:
        assert "got more than 500;" in refused(ordered)
    assert "LIMIT 501" in queries[-1]["sql"]
    ordered.max_pending = scan.WINDOW + 3
    assert_run(ordered(limit=1), processed=1, stopped="limit")


def test_no_more_than_a_bounded_number_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from dcl_processor.runner import limits

    monkeypatch.setattr(limits, "MOST_COUNTED", scan.WINDOW + 1)
    parcels(scan.WINDOW + 3)
    assert f"got more than {scan.WINDOW + 1};" in refused(processor(the.ignore, max_pending=400))
    assert f"got more than {scan.WINDOW + 2};" in refused(
        processor(the.ignore, max_pending=scan.WINDOW + 2)
    )


def test_a_row_that_matches_several_times_counts_once() -> None:
    first, *others = parcels(3, depot=Depot.objects.create(name="north"))
    Scan.objects.bulk_create(Scan(parcel=first) for _ in range(scan.WINDOW + 1))
    Scan.objects.bulk_create(Scan(parcel=parcel) for parcel in others)
    scanned = UNSENT.filter(scans__ok=True)
    assert "got 3;" in refused(processor(never, pending=scanned, max_pending=2))
    assert_run(processor(the.ignore, pending=scanned, max_pending=3)(), processed=3)


@pytest.mark.parametrize("option", [{"concurrency": 3}, {"batch_size": 3}], ids=str)
def test_it_refuses_before_threads_and_batches_begin(option: Any) -> None:
    rows = the.errands(4)
    assert "got 4;" in refused(the.transactional(the.ignore, max_pending=3, **option))
    assert all(the.untouched(row) for row in rows)


async def later(row: Any) -> None:
    """Handle a row asynchronously."""
    raise AssertionError(row)


def test_it_refuses_with_asynchronous_handlers() -> None:
    rows = the.errands(4)
    assert "got 4;" in refused(the.at_least_once(later, max_pending=3, concurrency=4))
    assert all(the.untouched(row) for row in rows)
    assert the.our_threads() == []


def test_no_signal_is_sent_and_the_error_has_the_report() -> None:
    parcels(2)
    sent: list[Any] = []

    def receive(sender: Any, **sent_with: Any) -> None:
        sent.append(sent_with)

    for signal in (row_finished, run_finished):
        signal.connect(receive)
    try:
        with pytest.raises(TooManyPending) as caught:
            processor(the.ignore, max_pending=1)()
    finally:
        for signal in (row_finished, run_finished):
            signal.disconnect(receive)
    assert sent == []
    report: Any = caught.value
    assert not report.report.did_something


def test_rows_that_arrive_during_the_run_are_not_counted() -> None:
    """It is a look before the first row: a run that has begun goes on, window after window."""
    number = 2 * scan.WINDOW + 1
    parcels(number)

    def handle(row: Parcel) -> None:
        if row.priority == 0:
            parcels(number + 1, priority=1)

    run = processor(handle, max_pending=number, batch_size=scan.WINDOW)
    assert_run(run(), processed=number)
    assert f"got {number + 1};" in refused(run)
