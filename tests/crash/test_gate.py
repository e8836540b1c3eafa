"""I9: a process killed while its claim has its snapshot and not yet its lock.

The server notices only when it answers. A claim inside a transaction is rolled back then; one that
is a single statement is committed by that time, and only the row shows it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from django.db import connection

from tests.contract.support.gate import INSTALL_GATE, KEY
from tests.crash import processors, victims
from tests.crash.audit import effects
from tests.crash.rows import FIRST, SECOND, fresh, those, time_passes
from tests.waiting import join, until

pytestmark = pytest.mark.django_db(transaction=True)

# Those of this database: another run of the tests may have a gate of its own.
WAITERS = (
    "SELECT pid FROM pg_locks JOIN pg_database ON pg_database.oid = database "
    "WHERE datname = current_database() AND locktype = 'advisory' AND objid = %s AND NOT granted"
)


@pytest.mark.parametrize(
    ("name", "at", "claimed"),
    [
        ("transactional", 0, set()),
        ("transactional", 1, set()),
        ("claim", 0, set()),
        ("claim", 1, {SECOND}),
        ("claim_spanning", 1, set()),
        ("lease", 0, set()),
        ("lease", 1, {SECOND}),
    ],
)
def test_i9_killed_between_snapshot_and_lock(
    nursery: None, audit: str, name: str, at: int, claimed: set[int]
) -> None:
    fresh(FIRST, SECOND)
    processor = getattr(processors, name)
    with connection.cursor() as cursor:
        cursor.execute(INSTALL_GATE)
        cursor.execute("SELECT pg_advisory_lock(%s)", [KEY])
        process = victims.start_at_gate(name, audit, at)
        waiters: list[int] = []

        def came() -> bool:
            cursor.execute(WAITERS, [KEY])
            waiters[:] = [pid for (pid,) in cursor.fetchall()]
            return bool(waiters)

        def gone() -> bool:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)", [waiters])
            return bool(cursor.fetchone()[0] == 0)

        until(came, "the claim to come to the gate")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        join(process)
        cursor.execute("SELECT pg_advisory_unlock(%s)", [KEY])
        until(gone, "its session to end")

    before = {FIRST} if at else set()
    assert effects() == Counter(before)
    assert those(lambda row: row.done) == before
    assert those(lambda row: row.claimed or row.leased_until) == claimed
    processor()
    assert effects() == Counter({FIRST, SECOND} - claimed)
    if name == "claim":
        assert {row.pk for row in processor.in_doubt(older_than=0)} == claimed
    else:
        time_passes()
        processor()
        assert effects() == Counter([FIRST, SECOND])
