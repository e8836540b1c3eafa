"""A claim among other workers: it takes the first rows that can be had of those that come next.

It is one statement more that locks and asks, so whatever holds of the other ones has to hold of it.
Elsewhere than on PostgreSQL a claim names the rows that it is to take, and there is no choice.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from dcl_processor import batch_processor
from tests.contract.support import errands as the
from tests.contract.support.parcels import UNSENT, parcels
from tests.contract.support.reports import assert_run
from tests.contract.support.wanted import refuse_to_load
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


# --- the second check


# --- what it takes


@pytest.mark.usefixtures("choosing")
@the.all_deliveries
@pytest.mark.parametrize("size", [1, 2])
def test_no_more_rows_are_taken_than_are_handled_now(make: Any, size: int) -> None:
    """The others are free for other workers, and as they were."""
    rows = the.errands(6)
    free: list[int] = []

    def handle(row: Errand) -> None:
        with transaction.atomic(using="other"):
            others = the.PENDING.using("other").filter(leased_until=None)
            free.append(len(others.select_for_update(skip_locked=True)))

    report = make(handle, batch_size=size)()
    assert_run(report, processed=len(rows))
    expected = [6 - size * (1 + place // size) for place in range(6)]
    assert free == expected


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("own_table", [True, False])
def test_a_row_that_cannot_be_loaded_costs_the_others_nothing(
    own_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = parcels(5)
    refuse_to_load(rows[1], monkeypatch)
    calls: list[int] = []
    asked = UNSENT if own_table else UNSENT.filter(pk__in=UNSENT.values("pk"))
    run = batch_processor(pending=asked, done={"sent": True})(lambda row: calls.append(row.pk))
    report = run()
    assert calls == [row.pk for row in rows if row != rows[1]]
    assert_run(report, processed=4, failed=1)


# --- order
