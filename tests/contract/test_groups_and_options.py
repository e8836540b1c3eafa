"""Groups together with marks, hand-outs, hooks, backlogs, and workers of the same command."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.utils import timezone

from dcl_processor import BatchProcessor, Lease, Report, batch_processor
from dcl_processor.engine import key_claim
from dcl_processor.engine.run import Run
from dcl_processor.settlement.rehearsal import Rehearsal
from tests.contract.support import errands as the
from tests.contract.support.groups import SHORT_CLAIMS, grouped, in_order, rows_of
from tests.contract.support.marking import left_by_a_dead_worker, marking
from tests.contract.support.messages import SENDS_SEVERAL
from tests.contract.support.reports import assert_run
from tests.contract.support.wanted import corrupt, refuse_to_load
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.grouped"


def keyed(handler: Any = the.ignore, **options: Any) -> BatchProcessor[Errand]:
    return marking(handler, **{"group_by": "place", "name": NAME, **options})


def test_the_mark_of_a_dead_worker_goes_with_its_lease() -> None:
    dead, sibling = left_by_a_dead_worker(place=1), rows_of(1)[-1]
    assert_run(keyed()(filter=the.only(sibling)), processed=1)
    dead.refresh_from_db()
    assert (dead.claimed, dead.result, dead.claimed_at) == (False, "", None)
    assert dead.leased_until == Lease(60).taken_away


def run_of(processor: BatchProcessor[Errand], *, is_verified: bool) -> Report:
    """Run; after its first rows a run has verified the flips, and claims by one statement."""
    run = Run(processor)
    if is_verified:
        run.trust(Rehearsal(set(), {}))
    return run.execute()


def after_the_look(patch: pytest.MonkeyPatch, act: Callable[[Any], object]) -> None:
    """Act each time between the look at the rows of the locked keys and their claim."""
    real = key_claim.take_turn

    def take_turn(session: Any, question: Any, wanted: Any) -> Any:
        turn = real(session, question, wanted)
        act(wanted.pks)
        return turn

    patch.setattr(key_claim, "take_turn", take_turn)


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_siblings_of_a_lapsed_row_wait_if_its_worker_renews_it_before_the_claim(
    size: int, is_verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is locked, and the lapsed row is among the wanted ones: then its lease is renewed."""
    dead, sibling = left_by_a_dead_worker(place=1), rows_of(1)[-1]
    renewed: list[int] = []

    def renew(wanted: Any) -> None:
        if not renewed and dead.pk in wanted:
            renewed.append(dead.pk)
            later = timezone.now() + timedelta(days=1)
            table = Errand.objects.using("other").filter(pk=dead.pk)
            the.elsewhere(lambda: table.update(leased_until=later))

    after_the_look(monkeypatch, renew)
    handled: list[int] = []
    run = keyed(lambda row: handled.append(row.pk), batch_size=size)
    report = run_of(run, is_verified=is_verified)
    assert renewed == [dead.pk]
    assert (handled, report.processed) == ([], 0)
    assert the.untouched(sibling)


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_row_that_is_moved_to_another_key_before_its_claim_is_left_as_it_was(
    is_verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new key is not locked."""
    [row] = rows_of(1)
    table = Errand.objects.using("other").filter(pk=row.pk)
    after_the_look(monkeypatch, lambda _: the.elsewhere(lambda: table.update(place=2)))
    assert run_of(keyed(), is_verified=is_verified).processed == 0
    assert the.untouched(row)


def test_a_place_that_another_worker_takes_before_the_claim_leaves_the_others_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its row is among the wanted ones: it is missed, and counts as in flight once."""
    rows, real, leased = rows_of(1, 1, 1), key_claim.take_turn, list[int]()

    def take_turn(*given: Any) -> Any:
        if not leased:
            leased.append(rows[0].pk)
            later = timezone.now() + timedelta(days=1)
            table = Errand.objects.using("other").filter(pk__in=leased)
            the.elsewhere(lambda: table.update(leased_until=later))
        return real(*given)

    monkeypatch.setattr(key_claim, "take_turn", take_turn)
    report = keyed(max_per_group=3, batch_size=3)(wait_for_locked=0)
    assert (report.processed, report.held) == (2, 0)
    assert list(Errand.objects.filter(done=False)) == rows[:1]


if not connection.features.has_select_for_update:
    # There the other session's write would have to wait for the claim.
    del test_siblings_of_a_lapsed_row_wait_if_its_worker_renews_it_before_the_claim
    del test_a_row_that_is_moved_to_another_key_before_its_claim_is_left_as_it_was


@pytest.mark.parametrize(("most", "number"), [(None, 1), (2, 2)])
@pytest.mark.parametrize("size", [1, 3])
def test_as_many_rows_of_a_key_are_handed_out_as_may_be_in_flight(
    most: int | None, number: int, size: int
) -> None:
    rows_of(1, 1, 1, 2)
    processor = keyed(max_per_group=most, batch_size=size)
    handed = processor.reserve(4)
    places = sorted(each.row.place for each in handed)
    assert places == [1] * number + [2]
    assert processor.reserve(4) == []
    handed[0].settle()
    assert [each.row.place for each in processor.reserve(4)] == [handed[0].row.place] * (
        handed[0].row.place == 1
    )


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_lapsed_row_whose_sibling_came_first_still_shows_that_its_worker_died(
    attempts: int,
) -> None:
    """A row without attempts left gets its dead letter, which is a function."""
    dead, sibling = left_by_a_dead_worker(place=1), rows_of(1)[-1]
    Errand.objects.filter(pk=dead.pk).update(attempts=attempts)
    seen: list[tuple[int, int]] = []
    processor = keyed(
        retry=the.retry(max_attempts=3),
        get_failed=lambda row, error: {"dead": True},
        handler=lambda row: seen.append((row.pk, row.attempts)),
    )
    assert_run(processor(filter=the.only(sibling)), processed=1)
    assert seen == [(sibling.pk, 1)]
    report = processor()
    dead.refresh_from_db()
    if attempts == 3:
        assert_run(report, failed=1)
        assert (dead.dead, seen[1:]) == (True, [])
    else:
        assert_run(report, processed=1)
        assert (dead.done, seen[1:]) == (True, [(dead.pk, 2)])


@pytest.mark.parametrize(("most", "size"), [(1, 2), (2, 3)])
def test_a_lapsed_row_that_is_not_wanted_any_more_cannot_be_renewed(most: int, size: int) -> None:
    """It was among the wanted rows, of which the key has room for fewer."""
    fresh = rows_of(*[1] * most)
    dead = left_by_a_dead_worker(place=1)
    renewed: list[int] = []

    def handle(row: Errand) -> None:
        table = Errand.objects.using("other").filter(pk=dead.pk, leased_until=dead.leased_until)
        later = timezone.now() + timedelta(days=1)
        renewed.append(the.elsewhere(lambda: table.update(leased_until=later)))

    keyed(handle, max_per_group=most, batch_size=size)(wait_for_locked=0)
    assert renewed[0] == 0
    assert not Errand.objects.filter(pk__in=[row.pk for row in fresh], done=False).exists()


@pytest.mark.parametrize("make", [grouped, in_order])
@pytest.mark.parametrize("delivery", SHORT_CLAIMS)
def test_a_row_that_cannot_be_loaded_fails_alone_among_the_rows_of_other_keys(
    delivery: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asynchronous handlers get rows of several keys by one claim."""
    rows, handled = rows_of(1, 2, 3, 1, 2), list[int]()

    async def handle(row: Errand) -> None:
        handled.append(row.pk)

    refuse_to_load(rows[1], monkeypatch, corrupt)
    report = make(delivery, handle)(concurrency=4, timeout=PATIENCE)
    # In order, what comes behind it waits.
    assert_run(report, processed=4 - report.held, failed=1, held=int(make is in_order))
    assert rows[1].pk not in handled


if SENDS_SEVERAL:

    def test_rows_of_a_key_whose_waiting_flips_fail_are_redone_one_by_one(
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Nothing of the key is left to be claimed when the message with its flips fails."""
        monkeypatch.setattr("dcl_processor.candidates.groups.place_among", lambda keys: 0)
        for key, tries in [(0, 1), (1, 1), (1, 0), (1, 1)]:
            Parcel.objects.create(priority=key, tries=tries, weight=1)
        processor: BatchProcessor[Parcel] = batch_processor(
            pending=Parcel.objects.filter(sent=False),
            done={"sent": True, "weight": F("weight") / F("tries")},
            group_by="priority",
            batch_size=3,
        )(the.ignore)
        assert_run(processor(), processed=3, failed=1)
        assert Parcel.objects.get(sent=False).tries == 0
