"""A claim among other workers: it takes the first rows that can be had of those that come next.

It is one statement more that locks and asks, so whatever holds of the other ones has to hold of it.
Elsewhere than on PostgreSQL a claim names the rows that it is to take, and there is no choice.
"""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.mark.usefixtures("choosing")
@the.all_deliveries
@pytest.mark.parametrize("size", [1, 2])
def test_no_more_rows_are_taken_than_are_handled_now(make: Any, size: int) -> None:
    """The others are free for other workers, and as they were."""
    rows = the.errands(6)
    free: list[int] = []
    places: list[int] = []

    def handle(row: Errand) -> None:
        places.append(row.place)
        with transaction.atomic(using="other"):
            others = the.PENDING.using("other").filter(leased_until=None)
            free.append(len(others.select_for_update(skip_locked=True)))

    report = make(handle, batch_size=size)()
    assert_run(report, processed=len(rows))
    expected = [6 - size * (1 + place // size) for place in range(6)]
    assert free == expected
    assert places == [*range(6)]
