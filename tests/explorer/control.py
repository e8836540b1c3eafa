"""The session that holds the gates, looks from outside, and sets the rows back.

The gate is a volatile function in a statement's predicate, which PostgreSQL calls after it has
taken the snapshot and before it asks for the row's lock. It says that it was reached (a NOTICE is
sent at once), and waits for an advisory lock that this session holds. It costs much, so that it
is called last, and only for a row that passed the other conditions.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any, Self

from django.db import connection

#: The advisory locks' first key, of no meaning; the second is the number of the visit.
KEY = 20_012
GATES_AHEAD = 200

INSTALL = f"""
    CREATE UNLOGGED SEQUENCE IF NOT EXISTS explorer_gates MINVALUE 0;
    CREATE OR REPLACE FUNCTION explorer_gate() RETURNS boolean VOLATILE COST 1000000
    LANGUAGE plpgsql AS $$
    DECLARE visit int := nextval('explorer_gates');
    BEGIN
        RAISE NOTICE 'gate %', visit;
        PERFORM pg_advisory_lock_shared({KEY}, visit);
        PERFORM pg_advisory_unlock_shared({KEY}, visit);
        RETURN true;
    END $$;
"""

#: The clock of the actors' sessions, which find this function before the server's own.
INSTALL_CLOCK = """
    CREATE SCHEMA IF NOT EXISTS explorer;
    CREATE TABLE IF NOT EXISTS explorer.clock AS SELECT 0 AS passed;
    CREATE OR REPLACE FUNCTION explorer.statement_timestamp() RETURNS timestamptz
    STABLE LANGUAGE sql AS $$
        SELECT pg_catalog.statement_timestamp() + make_interval(secs => passed) FROM explorer.clock
    $$;
"""

CLOCK_SET_BACK = "UPDATE explorer.clock SET passed = 0"


class Control:
    """A session of its own, used by the scheduler alone."""

    def __init__(self) -> None:
        self._wrapper: Any = connection.copy()
        self._closed_up_to = 0

    def __enter__(self) -> Self:
        self._wrapper.ensure_connection()
        # Several statements in one go, and without Django's part: there are many schedules.
        self._driver = self._wrapper.connection
        self.ask(INSTALL)
        self.ask(INSTALL_CLOCK)
        [[visit]] = self.ask("SELECT nextval('explorer_gates')")
        self._closed_up_to = visit + 1
        self.close_gates(visit)
        [[self.pid]] = self.ask("SELECT pg_backend_pid()")
        return self

    def __exit__(self, *_: object) -> None:
        self._wrapper.close()

    def ask(self, sql: str) -> list[Any]:
        cursor = self._driver.execute(sql)
        return cursor.fetchall() if cursor.description else []

    def close_gates(self, visit: int) -> None:
        """Close the gates to come, unless there are enough; ``visit``: the last one."""
        if visit + GATES_AHEAD // 2 > self._closed_up_to:
            first, last = self._closed_up_to, self._closed_up_to + GATES_AHEAD
            numbers = f"generate_series({first}, {last - 1}) n"
            self.ask(f"SELECT pg_advisory_lock({KEY}, n) FROM {numbers}")  # noqa: S608  # numbers
            self._closed_up_to = last

    def open_gate(self, visit: int) -> None:
        """Let through the session that waits there."""
        self.ask(f"SELECT pg_advisory_unlock({KEY}, {visit})")
        self.close_gates(visit)

    def end(self, pid: int) -> None:
        """End a session, with its locks; another thread may ask."""
        other: Any = connection.copy()
        with closing(other), other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])

    def blockers(self, pid: int) -> list[int]:
        """Return the sessions that this one waits for."""
        [[pids]] = self.ask(f"SELECT pg_blocking_pids({pid})")
        return [each for each in pids if each != self.pid]
