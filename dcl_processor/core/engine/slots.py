"""The places of a processor with ``max_in_flight``: a row is in flight only in one of them.

A place is an advisory lock of an open transaction of a session of its own. The server releases it
when that session ends, so that a worker that dies frees its places with no timer.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import Any

from django.db import Error, connections

from dcl_processor.core.report.exceptions import Unsupported
from dcl_processor.core.sql.errors import has_news


class Slots:
    """The places that a run holds; ``wanted``: how many it can use."""

    def __init__(self, using: str, label: str, number: int, wanted: int) -> None:
        self._label, self._number, self._wanted = label, number, wanted
        self._connection: Any = connections[using].copy()
        self.held = 0
        if self._connection.vendor != "postgresql":
            raise Unsupported(
                f"{label}: expected max_in_flight on PostgreSQL, where a lock ends with its "
                f"session, got {using!r}, on another database; leave max_in_flight out."
            )

    def take(self) -> bool:
        """Take free places, unless this run has some; return whether it has one."""
        if self.held:
            return True
        # Race: worker over the cap. The lock is taken, or not, in one statement.
        numbers = ",".join(str(_number(self._label, at)) for at in range(self._number))
        with self._connection.cursor() as cursor:
            cursor.execute("BEGIN")
            # A scan of a function's rows calls the lock function row by row, until it has enough.
            cursor.execute(
                f"SELECT number FROM unnest('{{{numbers}}}'::bigint[]) number "  # noqa: S608
                f"WHERE pg_try_advisory_xact_lock(number) LIMIT {self._wanted:d}"
            )
            self.held = len(cursor.fetchall())
            if not self.held:
                cursor.execute("ROLLBACK")
        return self.held > 0

    def are_lost(self) -> bool:
        """Return whether the session that had them has ended; then no row may start."""
        return self.held > 0 and has_news(self._connection.connection)

    def release(self) -> None:
        """Free the places, and end their session."""
        self.held = 0
        with suppress(Error):
            self._connection.close()


def _number(label: str, slot: int) -> int:
    digest = blake2b(f"dcl_processor slot {slot} of {label}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
