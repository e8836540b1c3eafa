"""Groups together with marks, lapsed leases, and rows that cannot be loaded."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from dcl_processor import BatchProcessor
from dcl_processor.keys import window
from tests.contract.support import errands as the
from tests.contract.support.groups import rows_of
from tests.contract.support.marking import left_by_a_dead_worker, marking
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import before_statement
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

NAME = "shop.grouped"


def keyed(handler: Any = the.ignore, **options: Any) -> BatchProcessor[Errand]:
    return marking(handler, **{"group_by": "place", "name": NAME, **options})


def test_a_row_of_a_dead_worker_holds_its_key_until_it_is_taken_over() -> None:
    dead, sibling = left_by_a_dead_worker(place=1), rows_of(1)[-1]
    assert_run(keyed()(filter=the.only(sibling), wait_for_locked=0), held=1)
    handled: list[int] = []
    assert_run(keyed(lambda row: handled.append(row.pk))(), processed=2)
    assert handled == [dead.pk, sibling.pk]
    assert not Errand.objects.exclude(done=True, claimed=False, leased_until=None).exists()


def test_a_row_of_a_dead_worker_is_taken_over_first_however_late_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(window, "ROWS", 1)
    rows_of(1, 1)
    dead = left_by_a_dead_worker(place=1)
    handled: list[int] = []
    assert_run(keyed(lambda row: handled.append(row.pk))(), processed=3)
    assert handled[0] == dead.pk


def test_a_row_of_a_dead_worker_without_attempts_left_gets_its_dead_letter() -> None:
    """Its key goes on."""
    dead, sibling = left_by_a_dead_worker(place=1, attempts=3), rows_of(1)[-1]
    seen: list[int] = []
    processor = keyed(
        retry=the.retry(max_attempts=3),
        get_failed=lambda row, error: {"dead": True},
        handler=lambda row: seen.append(row.pk),
    )
    assert_run(processor(), processed=1, failed=1)
    dead.refresh_from_db()
    assert (dead.dead, seen) == (True, [sibling.pk])


if connection.vendor == "postgresql":

    def before_the_lock_of_a_key(act: Any) -> Any:
        """Act after rows were read, and before their keys are locked."""
        return before_statement(lambda sql: "pg_try_advisory_xact_lock" in sql, act)

    def lease(*rows: Errand) -> None:
        later = timezone.now() + timedelta(days=1)
        table = Errand.objects.using("other").filter(pk__in=[row.pk for row in rows])
        the.elsewhere(lambda: table.update(leased_until=later))

    @pytest.mark.parametrize("size", [1, 2])
    def test_siblings_of_a_lapsed_row_wait_if_its_worker_renews_it_before_the_claim(
        size: int,
    ) -> None:
        dead, sibling = left_by_a_dead_worker(place=1), rows_of(1)[-1]
        with before_the_lock_of_a_key(lambda: lease(dead)):
            report = keyed(batch_size=size)(wait_for_locked=0)
        assert report.processed == 0
        assert the.untouched(sibling)

    def test_a_place_that_another_worker_takes_before_the_claim_leaves_the_others_free() -> None:
        """Its row is among the wanted ones: it is missed, and counts as in flight once."""
        rows = rows_of(1, 1, 1)
        with before_the_lock_of_a_key(lambda: lease(rows[0])):
            report = keyed(max_per_group=3, batch_size=3)(wait_for_locked=0)
        assert report.processed == 2
        assert list(Errand.objects.filter(done=False)) == rows[:1]

    def test_of_rows_that_are_claimed_together_no_more_start_than_there_are_places() -> None:
        """Another worker takes a place for a row that is not among the wanted ones."""
        rows = rows_of(1, 1, 1)
        in_flight: list[int] = []

        def handle(row: Errand) -> None:
            in_flight.append(Errand.objects.exclude(leased_until=None).count())

        with before_the_lock_of_a_key(lambda: lease(rows[2])):
            report = keyed(handle, max_per_group=2, batch_size=2)(wait_for_locked=0)
        assert report.processed == 2
        assert in_flight == [2, 2]
