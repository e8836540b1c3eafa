"""Ends a session of the database from another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connection, connections

from tests.edge.manage import wait_for

ENDED: dict[str, tuple[Callable[[Any], int], str, str]] = {
    "postgresql": (
        lambda driver: driver.info.backend_pid,
        "SELECT pg_terminate_backend(%s)",
        "SELECT count(*) FROM pg_stat_activity WHERE pid = %s",
    ),
    "mysql": (
        lambda driver: driver.thread_id(),
        "KILL %s",
        "SELECT count(*) FROM information_schema.processlist WHERE id = %s",
    ),
}


def end_session_of(using: str) -> None:
    """End it from another session, and wait until it has gone, locks and all."""
    session_of, end, count = ENDED[connection.vendor]
    connections[using].ensure_connection()
    driver: Any = connections[using].connection
    # Not asked of the session itself: a question would open a transaction where none is open.
    session = session_of(driver)

    def gone() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(count, [session])
            return bool(cursor.fetchone()[0] == 0)

    with connection.cursor() as cursor:
        cursor.execute(end, [session])
    wait_for(gone, f"session {session} to end")
