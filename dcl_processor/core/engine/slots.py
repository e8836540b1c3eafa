"""The slots of a processor with ``max_in_flight``: a worker is at work only while it holds one.

A slot is an advisory lock of an open transaction of a session of its own. The server releases it
when that session ends, so that a worker that dies frees its slot with no timer.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import Any

from django.db import Error, connections

from dcl_processor.core.report.exceptions import Unsupported
from dcl_processor.core.sql.errors import has_news


class Slot:
    """One of the slots of a processor."""

    def __init__(self, using: str, label: str, number: int) -> None:
        self._label, self._number = label, number
        self._connection: Any = connections[using].copy()
        self._is_taken = False
        if self._connection.vendor != "postgresql":
            raise Unsupported(
                f"{label}: expected max_in_flight on PostgreSQL, where a lock ends with its "
                f"session, got {using!r}, on another database; leave max_in_flight out."
            )

    def take(self) -> bool:
        """Take a free slot, unless this worker has one; return whether it has one."""
        if self._is_taken:
            return True
        numbers = ",".join(str(_number(self._label, at)) for at in range(self._number))
        with self._connection.cursor() as cursor:
            cursor.execute("BEGIN")
            # A scan of a function's rows calls the lock function row by row, and ends at the first.
            cursor.execute(
                f"SELECT number FROM unnest('{{{numbers}}}'::bigint[]) number "  # noqa: S608
                "WHERE pg_try_advisory_xact_lock(number) LIMIT 1"
            )
            self._is_taken = cursor.fetchone() is not None
            if not self._is_taken:
                cursor.execute("ROLLBACK")
        return self._is_taken

    def is_lost(self) -> bool:
        """Return whether the session that had the slot has ended; then no row may start."""
        return self._is_taken and has_news(self._connection.connection)

    def release(self) -> None:
        """Free the slot, and end its session."""
        self._is_taken = False
        with suppress(Error):
            self._connection.close()


def _number(label: str, slot: int) -> int:
    digest = blake2b(f"dcl_processor slot {slot} of {label}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
