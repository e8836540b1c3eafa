"""More keys, or rows of one, than a run reads at once: each gets its turn, and none is left."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import QuerySet
from django.utils import timezone

from tests.contract.support import errands as the
from tests.contract.support.gate import HAS_ROW_LOCKS
from tests.contract.support.groups import MAKERS, Make, grouped, in_order, rows_of, run_beside
from tests.contract.support.parcels import processor
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import part_locked, uncommitted
from tests.models import Errand, Parcel, Tag

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: More keys than are read at once.
MANY = 260
#: Keys that are read first, and that cannot be handled.
BLOCKED = 220
#: Rows of a window; where the database has no LATERAL, windows go key by key.
ROWS = 2_000

each = pytest.mark.parametrize("delivery", MAKERS)
each_mode = pytest.mark.parametrize(
    "mode", [{}, {"in_order": True}, {"max_per_group": 2}], ids=["one", "in order", "two"]
)


@each
@each_mode
def test_a_run_ends_when_no_key_has_a_row_left(delivery: str, mode: dict[str, Any]) -> None:
    rows_of(*range(MANY))
    calls: Counter[int] = Counter()
    report = grouped(delivery, lambda row: calls.update([row.pk]), **mode)()
    assert_run(report, processed=MANY)
    assert {*calls.values()} == {1}
    assert not Errand.objects.exclude(done=True, leased_until=None).exists()


@pytest.mark.parametrize("make", [grouped, in_order])
def test_keys_behind_many_whose_rows_wait_are_handled(make: Any) -> None:
    later = timezone.now() + timedelta(hours=1)
    rows_of(*range(BLOCKED), next_attempt_at=later)
    # In order they are read, because the row behind the one that waits may be tried as such.
    Errand.objects.bulk_create([Errand(place=place) for place in range(BLOCKED)])
    Errand.objects.bulk_create([Errand(place=place) for place in range(BLOCKED, MANY)])
    run = make("transactional", the.ignore, retry=the.retry())
    held = BLOCKED if make is in_order else 0
    assert_run(run(wait_for_locked=0), processed=MANY - held, held=held)
    done = Errand.objects.filter(done=True)
    assert done.filter(place__gte=BLOCKED).count() == MANY - BLOCKED
    assert done.filter(place__lt=BLOCKED).count() == BLOCKED - held


@pytest.mark.parametrize("make", [grouped, in_order])
def test_keys_behind_many_whose_rows_fail_are_handled(make: Any) -> None:
    rows_of(*range(MANY))

    def fail(row: Errand) -> None:
        if row.place < BLOCKED:
            raise ValueError

    run = make("at_least_once", fail, max_consecutive_failures=0)
    assert_run(run(), processed=MANY - BLOCKED, failed=BLOCKED)
    done = Errand.objects.filter(done=True)
    assert done.count() == done.filter(place__gte=BLOCKED).count() == MANY - BLOCKED


if HAS_ROW_LOCKS:

    def test_keys_behind_many_whose_rows_are_locked_are_handled() -> None:
        rows_of(*range(MANY))
        behind = Errand.objects.filter(place__lt=BLOCKED)
        with uncommitted(lambda: behind.update(result="another session's")):
            report = grouped("transactional", the.ignore)(wait_for_locked=0)
        assert_run(report, processed=MANY - BLOCKED, skipped=BLOCKED)
        done = Errand.objects.filter(done=True)
        assert done.count() == done.filter(place__gte=BLOCKED).count() == MANY - BLOCKED

    @pytest.mark.parametrize("option", ["group_by", "fair_by"])
    def test_a_key_with_most_of_the_rows_holds_up_the_others_for_one_window_at_most(
        option: str,
    ) -> None:
        few = [*range(2, 9)] * 10
        rows_of(*[1] * (ROWS + 100), *few)
        keys = {"group_by": None, option: "place"}
        report = grouped("transactional", the.ignore, batch_size=100, **keys)(limit=ROWS)
        assert_run(report, processed=ROWS, stopped="limit")
        assert not Errand.objects.filter(done=False, place__gt=1).exists()

    def test_a_key_waits_for_one_window_of_each_key_before_it() -> None:
        """A window has 2,000 rows: ten of each of its 200 keys, although these have more."""
        before = [place for place in range(200) for _ in range(12)]
        rows_of(*before, *range(200, MANY))
        report = grouped("transactional", the.ignore, batch_size=100)(limit=2_000 + MANY - 200)
        assert_run(report, processed=2_000 + MANY - 200, stopped="limit")
        assert not Errand.objects.filter(done=False, place__gte=200).exists()
        assert Errand.objects.filter(done=False).count() == 2 * 200


@pytest.mark.parametrize("option", ["group_by", "fair_by"])
def test_a_run_that_is_cut_short_starts_a_row_of_each_key_before_the_next_of_a_long_one(
    option: str,
) -> None:
    rows_of(*[1] * 100, *range(2, 10))
    keys = {"group_by": None, option: "place"}
    report = grouped("transactional", the.ignore, **keys)(limit=9)
    assert_run(report, processed=9, stopped="limit")
    assert {*Errand.objects.filter(done=True).values_list("place", flat=True)} == {*range(1, 10)}


def test_runs_that_are_cut_short_come_to_the_highest_keys() -> None:
    """Although the lowest ones get new rows all the time, more than a run handles."""
    rows_of(*range(MANY))
    run = grouped("transactional", the.ignore, batch_size=100)
    highest = Errand.objects.filter(place=MANY - 1, done=True)
    for _ in range(30):
        run(limit=200)
        if highest.exists():
            return
        Errand.objects.filter(place__lt=200).update(done=False)
    pytest.fail("30 runs have left out the highest key")


# --- many rows of one key, and what the report counts of rows that others have


fail = the.raising(ValueError("no such place"))


def test_rows_of_a_key_that_fail_are_each_tried_once_in_a_run() -> None:
    rows_of(*[1] * 300)
    options: dict[str, Any] = {"batch_size": 100, "max_consecutive_failures": 0}
    assert_run(grouped("transactional", fail, **options)(), failed=300)


def test_rows_that_are_given_up_let_those_behind_them_go_on() -> None:
    rows_of(*[1] * 30)
    report = in_order("transactional", fail, failed={"dead": True}, max_consecutive_failures=0)()
    assert_run(report, failed=30)


def tagged(number: int, **columns: Any) -> QuerySet[Parcel]:
    """Make parcels that match their pending queryset five times each."""
    tags = [Tag.objects.create(name="x") for _ in range(5)]
    for _ in range(number):
        Parcel.objects.create(**columns).tags.set(tags)
    return Parcel.objects.filter(sent=False, tags__name="x")


def test_rows_that_match_several_times_are_all_tried() -> None:
    pending = tagged(60, weight=1)
    options: dict[str, Any] = {"max_consecutive_failures": 0, "batch_size": 60}
    report = processor(fail, pending=pending, group_by="weight", **options)()
    assert_run(report, failed=60)


def test_held_rows_that_match_several_times_are_counted_once() -> None:
    pending = tagged(3, weight=1)
    report = processor(fail, pending=pending, group_by="weight", in_order=True)()
    assert_run(report, failed=1, held=2)


if HAS_ROW_LOCKS:

    @pytest.mark.parametrize("delivery", MAKERS)
    @pytest.mark.parametrize(("make", "processed"), [(grouped, 1), (in_order, 0)])
    def test_a_row_that_another_session_has_locked_is_skipped(
        delivery: str, make: Make, processed: int
    ) -> None:
        one, _ = rows_of(1, 1)
        with part_locked(Errand, one.pk):
            report, _ = run_beside(make, delivery)
        assert_run(report, processed=processed, skipped=1, held=1 - processed)


def test_rows_of_a_batch_that_was_rolled_back_are_counted_once() -> None:
    """Otherwise the run would stop as many rows too early, and say that it is drained."""
    rows = rows_of(*[1] * 250)

    def flip(row: Errand) -> dict[str, Any]:
        return {"done": True, "result": None if row.pk == rows[20].pk else ""}

    report = grouped("transactional", the.ignore, done=flip, batch_size=100)()
    assert_run(report, processed=249, failed=1)
    assert not Errand.objects.filter(done=False).exclude(pk=rows[20].pk).exists()
