"""Leases of rows that share their claim or their settlement with others."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from threading import Event

import pytest
from django.db import connection

from dcl_processor import Lease
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import uncommitted
from tests.models import Errand
from tests.waiting import until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def test_a_row_whose_lease_has_lapsed_is_claimed_alone() -> None:
    """It may have killed its process, and costs the rows beside it no attempt."""
    the.errands(4, attempts=1, leased_until=datetime(2026, 1, 1, tzinfo=UTC))
    seen: list[list[int]] = []

    def handle(row: Errand) -> None:
        others = Errand.objects.filter(done=False).exclude(pk=row.pk)
        seen.append([*others.values_list("attempts", flat=True)])

    run = the.at_least_once(handle, retry=the.retry(), batch_size=10)
    assert_run(run(), processed=4)
    assert seen == [[1] * 3, [1] * 2, [1], []]


if connection.vendor == "postgresql":

    def test_rows_that_are_locked_at_their_settlement_do_not_hold_up_the_others() -> None:
        the.errands(40)
        calls, has_called = Counter[int](), Event()

        def handle(rows: list[Errand]) -> None:
            calls.update(row.place for row in rows)
            if not has_called.is_set():
                first = Errand.objects.filter(place__lt=12).order_by().select_for_update()
                locks.enter_context(uncommitted(lambda: list(first.values_list("pk"))))
                has_called.set()

        run = the.at_least_once(the.ignore, process_batch=handle, lease=Lease(2), batch_size=40)
        with ExitStack() as locks, the.meanwhile(run) as results:
            the.wait(has_called)
            until(lambda: [run(), *results][1:], "the end of the first run")
        assert {place for place, number in calls.items() if number > 1 and place >= 12} == set()
