"""``dry_run()``: what a run would do, without a call of a handler, and without a change."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext

from dcl_processor import BatchProcessor
from dcl_processor.engine.trial import DryRun
from dcl_processor.exceptions import (
    InsideTransaction,
    InvalidDone,
    InvalidOption,
    StillPending,
    TooManyPending,
)
from dcl_processor.pending import scan
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.parcels import UNSENT, parcels, processor
from tests.contract.support.reports import assert_run
from tests.contract.support.retries import fail, retrying
from tests.contract.support.sessions import part_locked
from tests.models import Depot, Errand, Parcel, Scan

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def never(row: Any) -> None:
    """Handle a row, which a dry run does not."""
    raise AssertionError(row)


def contents() -> list[Any]:
    return list(Errand.objects.order_by("pk").values())


@the.all_deliveries
def test_it_says_what_a_run_would_do_and_changes_nothing(make: the.Make) -> None:
    rows = the.errands(7)
    before = contents()
    run = make(never)
    found = run.dry_run()
    pks = [row.pk for row in rows]
    assert found == DryRun(
        name=run.name, pending=7, due=7, first=tuple(pks[:5]), rehearsed=pks[0], limit=None
    )
    assert found.rows == 7
    assert str(found) == (
        f"{run.name}: dry run: would try 7 of 7 pending rows, first {', '.join(map(str, pks[:5]))}"
        f"; the flip takes row {pks[0]} out of pending"
    )
    assert contents() == before
    assert make(the.ignore)().processed == 7


def test_the_first_rows_are_those_that_the_run_tries_first() -> None:
    parcels(5)
    tried: list[Any] = []
    for asked in (UNSENT, UNSENT.order_by("-priority")):
        run = processor(lambda row: tried.append(row.pk), pending=asked)
        found = run.dry_run(limit=2)
        assert_run(run(limit=2), processed=2, stopped="limit")
        assert found.first == tuple(tried[-2:])
        assert (found.limit, found.rows, found.rehearsed) == (2, 2, found.first[0])
    assert len(tried) == 4


def test_the_filter_and_the_limit_are_those_of_a_run() -> None:
    parcels(5)
    run = processor(never)
    found = run.dry_run(filter=Q(priority__gt=1), limit=9)
    assert (found.pending, found.due, found.rows, len(found.first)) == (3, 3, 3, 3)
    nothing = run.dry_run(limit=0)
    assert (nothing.rows, nothing.first) == (0, ())
    assert f"{nothing}".startswith("tests.never: dry run: would try 0 of 5 pending rows; the flip")
    with pytest.raises(InvalidOption, match="expected limit"):
        run.dry_run(limit=-1)


def raises(error: type[Exception], match: str, run: BatchProcessor[Any], **parameters: Any) -> None:
    """See that the dry run raises what the run raises, and that neither changes a row."""
    before = contents()
    for each in (run.dry_run, run.run):
        with pytest.raises(error, match=match):
            each(**parameters)
    assert contents() == before


@the.all_deliveries
def test_it_raises_what_the_run_would_raise(make: the.Make) -> None:
    the.errands(4)
    stays = "claim" if make is the.at_most_once else "done"
    raises(StillPending, "still pending after it", make(never, **{stays: {"place": 7}}))
    raises(InvalidDone, "no_such", make(never, done={"no_such": True}))
    raises(TooManyPending, "got more;", make(never, max_pending=3))
    with transaction.atomic():
        words = r"outside any transaction.* got one inside transaction.atomic\(\) on 'default'"
        raises(InsideTransaction, words, make(never))
    assert make(never, max_pending=3).dry_run(limit=3).rows == 3


UNFORESEEN: dict[str, dict[str, Any]] = {
    "the handler's result": {"done": lambda row, result: {"done": result}},
    "the handler itself": {"done": None},
}


@pytest.mark.parametrize("options", UNFORESEEN.values(), ids=UNFORESEEN)
def test_a_flip_that_only_a_handler_shows_is_not_tried(options: Any) -> None:
    the.errands(2)
    found = the.transactional(never, **options).dry_run()
    assert (found.due, len(found.first), found.rehearsed) == (2, 2, None)
    assert str(found).endswith("; no flip was tried")


@the.all_deliveries
def test_it_says_that_the_database_refuses_the_flip_of_the_row(make: the.Make) -> None:
    """A handler may change that, so that the run is not refused as a whole."""
    Errand.objects.create(code="taken", done=True, claimed=True)
    row = Errand.objects.create()
    found = make(never, done={"done": True, "claimed": True, "code": "taken"}).dry_run()
    assert (found.first, found.rehearsed) == ((row.pk,), None)
    assert str(row.pk) in found.refused
    assert str(found).endswith(f"; {found.refused.removeprefix(f'{found.name}: ')}")
    assert "code" in found.refused
    assert the.untouched(row)


def test_it_says_that_a_function_gives_no_flip_for_the_row() -> None:
    Errand.objects.create()
    found = the.transactional(never, done=lambda row: {"no_such": 1 // row.place}).dry_run()
    assert found.rehearsed is None
    assert found.refused.startswith("tests.never: expected done to return a mapping")
    assert "ZeroDivisionError" in found.refused


if HAS_ROW_LOCKS:

    def test_a_row_that_another_session_has_locked_is_left_to_it() -> None:
        """The flip is tried on the first row that is free; if none is, on none."""
        rows = parcels(4)
        run = processor(never)
        with part_locked(Parcel, rows[0].pk):
            found = run.dry_run()
        assert (found.due, found.first[0], found.rehearsed) == (4, rows[0].pk, rows[1].pk)
        with ExitStack() as locks:
            for row in rows:
                locks.enter_context(part_locked(Parcel, row.pk))
            found = run.dry_run()
        assert (found.due, found.rehearsed) == (4, None)
        assert str(found).endswith("; no flip was tried")

# --- ``max_pending``: a run without a limit refuses a backlog that is larger than expected


def refused(run: BatchProcessor[Any], **parameters: Any) -> str:
    """Run, and return the sentence of the refusal; the last query of the run was a ``SELECT``."""
    with CaptureQueriesContext(connection) as queries, pytest.raises(TooManyPending) as caught:
        run(**parameters)
    assert all(query["sql"].startswith("SELECT") for query in queries)
    return str(caught.value)


def test_with_a_limit_it_handles_some_of_them_until_the_others_fit() -> None:
    parcels(5)
    run = processor(the.ignore, max_pending=3)
    assert_run(run(limit=1), processed=1, stopped="limit")
    assert "got more;" in refused(run)
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
    assert "got more;" in refused(waiting)
    assert_run(waiting(limit=2), processed=1, failed=1, to_retry=1, stopped="limit")
    assert_run(waiting(), processed=2)


@pytest.mark.parametrize("asked", [UNSENT, UNSENT.order_by("-priority")], ids=["key", "order"])
def test_rows_behind_the_first_window_are_counted_up_to_one_more(asked: Any) -> None:
    parcels(scan.WINDOW + 3)
    ordered = processor(the.ignore, pending=asked)
    ordered.max_pending = scan.WINDOW + 2
    assert "got more;" in refused(ordered)
    ordered.max_pending = 50
    with CaptureQueriesContext(connection) as queries:
        assert "got more;" in refused(ordered)
    assert "LIMIT 51" in queries[-1]["sql"]
    ordered.max_pending = scan.WINDOW + 3
    assert_run(ordered(limit=1), processed=1, stopped="limit")


def test_a_row_that_matches_several_times_counts_once() -> None:
    first, *others = parcels(3, depot=Depot.objects.create(name="north"))
    Scan.objects.bulk_create(Scan(parcel=first) for _ in range(scan.WINDOW + 1))
    Scan.objects.bulk_create(Scan(parcel=parcel) for parcel in others)
    scanned = UNSENT.filter(scans__ok=True)
    assert "got more;" in refused(processor(never, pending=scanned, max_pending=2))
    assert_run(processor(the.ignore, pending=scanned, max_pending=3)(), processed=3)
