"""``dry_run()``: what a run would do, without a call of a handler, and without a change."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction
from django.db.models import Q

from dcl_processor import BatchProcessor
from dcl_processor.exceptions import (
    InsideTransaction,
    InvalidDone,
    InvalidOption,
    StillPending,
    TooManyPending,
)
from dcl_processor.report import MOST_COUNTED, DryRun
from dcl_processor.runner import limits
from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.parcels import UNSENT, parcels, processor
from tests.contract.support.reports import assert_run
from tests.contract.support.wanted import held
from tests.models import Errand, Parcel

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
    latest_first = UNSENT.order_by("-priority")
    for option in ({}, {"strict_order": True}):
        run = processor(lambda row: tried.append(row.pk), pending=latest_first, **option)
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
    with pytest.raises(InvalidOption, match="expected filter"):
        run.dry_run(filter={"pk": 1})  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidOption, match="expected using"):
        run.dry_run(using="nowhere")


def test_with_nothing_pending_it_says_so() -> None:
    assert str(processor(never).dry_run()) == "tests.never: dry run: nothing pending"


def test_counts_have_an_end() -> None:
    found = DryRun(name="shop.send", pending=MOST_COUNTED + 1, due=MOST_COUNTED + 1, first=(1, 2))
    assert "would try 10000+ of 10000+ pending rows, first 1, 2; no flip" in str(found)
    assert found.as_dict() == {
        "name": "shop.send",
        "dry_run": True,
        "pending": 10_000,
        "due": 10_000,
        "rows": 10_000,
        "capped": True,
        "limit": None,
        "first": [1, 2],
        "rehearsed": None,
    }


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
    raises(TooManyPending, "got 4;", make(never, max_pending=3))
    with transaction.atomic():
        raises(InsideTransaction, "outside any transaction", make(never))
    assert make(never, max_pending=3).dry_run(limit=3).rows == 3


def test_it_raises_the_error_of_a_flip_of_the_row_that_is_wrong() -> None:
    the.errands(1)
    run = the.transactional(never, done=lambda row: {"place": row.place})
    with pytest.raises(StillPending, match="still pending after it"):
        run.dry_run()
    assert the.transactional(never, done=lambda row: {"done": True}).dry_run().rehearsed is not None


UNFORESEEN: dict[str, dict[str, Any]] = {
    "the handler's result": {"done": lambda row, result: {"done": result}},
    "the handler itself": {"done": None},
    "stays pending": {"repeats": True},
}


@pytest.mark.parametrize("options", UNFORESEEN.values(), ids=UNFORESEEN)
def test_a_flip_that_only_a_handler_shows_is_not_tried(options: Any) -> None:
    the.errands(2)
    found = the.transactional(never, **options).dry_run()
    assert (found.due, len(found.first), found.rehearsed) == (2, 2, None)
    assert str(found).endswith("; no flip was tried")


if HAS_ROW_LOCKS:

    def test_a_row_that_another_session_has_locked_is_left_to_it() -> None:
        """The flip is tried on the first row that is free; if none is, on none."""
        rows = parcels(7)
        run = processor(never)
        with held(rows[:2]):
            found = run.dry_run()
        assert (found.due, found.first[0], found.rehearsed) == (7, rows[0].pk, rows[2].pk)
        with held(rows):
            found = run.dry_run()
        assert (found.due, found.rehearsed) == (7, None)
        assert str(found).endswith("; no flip was tried")

    def test_a_row_that_was_finished_since_the_look_is_not_tried(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The claim asks again under the lock, as in a run."""
        rows = parcels(2)
        finish = limits.refuse_backlog

        def and_finish(*arguments: Any, **options: Any) -> None:
            finish(*arguments, **options)
            the.elsewhere(lambda: Parcel.objects.filter(pk=rows[0].pk).update(sent=True))

        monkeypatch.setattr(limits, "refuse_backlog", and_finish)
        assert processor(never, max_pending=2).dry_run().rehearsed == rows[1].pk
