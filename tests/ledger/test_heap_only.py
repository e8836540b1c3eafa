"""PostgreSQL writes the second-by-second changes of a record on the page of its row."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from dcl_processor.ledger.models import RecordedRun
from dcl_processor.ledger.recording import Work
from tests.contract.support.heartbeat import until

pytestmark = pytest.mark.django_db(transaction=True)


def updates() -> tuple[int, int]:
    """Return how many rows of the table were updated, and how many of them on their own page."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT pg_stat_get_tuples_updated(c), pg_stat_get_tuples_hot_updated(c) "
            "FROM (SELECT %s::regclass::oid AS c) t",
            [RecordedRun._meta.db_table],
        )
        updated, hot = cursor.fetchone()
    return updated, hot


def test_the_second_by_second_writes_touch_no_index() -> None:
    work = Work("shop.recorded", "watch")
    counts = Counter[str]()
    run: Any = SimpleNamespace(counts=counts)
    work.begin(run)

    def all_fit() -> bool:
        updated_before, hot_before = updates()
        for _ in range(50):
            counts["processed"] += 1
            work.flush()
        updated, hot = updates()
        assert updated - updated_before >= 49
        return hot - hot_before == updated - updated_before

    # Without an index on what is written, each fits on its page. With an index, none fits. An older
    # snapshot of another session, such as autovacuum's, keeps versions there for a while.
    until(all_fit)
