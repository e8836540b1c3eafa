"""The sessions that hold slots of a processor with ``max_workers``, as the server knows them."""

from __future__ import annotations

import time
from collections.abc import Callable

from django.db import connection

from dcl_processor.locking import slots

PATIENCE = 30.0  # seconds

#: PostgreSQL's advisory locks in the test database.
_HOLDERS = """
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database =
    (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def holders(label: str, most: int) -> list[int]:
    """Return the sessions that hold the processor's slots, one for each slot that is taken."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_HOLDERS)
            return [pid for (pid,) in cursor.fetchall()]
        locks = slots.SessionLocks(label)
        locks._database = str(connection.settings_dict["NAME"])
        found = []
        for slot in range(most):
            cursor.execute("SELECT IS_USED_LOCK(%s)", [locks._name(slot)])
            found += [session for (session,) in cursor.fetchall() if session is not None]
        return found


def end_session(session: int) -> None:
    """End a session as a person or a failover does, and wait until the server has ended it."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s)", [session])
        else:
            cursor.execute(f"KILL {session}")
    until(lambda: not _is_there(session))


def _is_there(session: int) -> bool:
    question = (
        "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        if connection.vendor == "postgresql"
        else "SELECT 1 FROM information_schema.processlist WHERE id = %s"
    )
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # In a handler's transaction, the first answer would be given again.
            cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(question, [session])
        return cursor.fetchone() is not None


def until(happened: Callable[[], bool]) -> None:
    """Wait, within bounds, for what another session or thread is to do."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
