"""Rows whose settlements wait for other sessions' locks, beside rows whose do not."""

from __future__ import annotations

import pytest
from django.db import connection

from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import uncommitted
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

LOCKED = range(5, 17)


@the.each_delivery
def test_twelve_locked_rows_of_forty_hold_up_no_other(make: the.Make) -> None:
    """Their own settlements are written when the other session has ended."""
    locked = [row.pk for row in the.errands(40) if row.place in LOCKED]
    done: list[int] = []

    def lock() -> None:
        list(Errand.objects.select_for_update().filter(pk__in=locked))

    def handle(row: Errand) -> None:
        if row.place == 4:
            locking.__enter__()
        if row.place == 39:
            done.extend(the.elsewhere(lambda: the.places(done=True)))
            locking.__exit__(None, None, None)

    locking = uncommitted(lock)
    assert_run(make(handle, batch_size=40)(), processed=40)
    assert done == [place for place in range(39) if place not in LOCKED]
    assert the.places(done=True) == [*range(40)]
    assert not connection.in_atomic_block
