"""The database sessions of a thread whose handler was interrupted at some step of its code."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import connections

from dcl_processor.database.driver import cancel, is_busy
from dcl_processor.locking.isolation import from_test_case


class Sessions:
    """What Django knew of the open transactions of this thread before the handler was called.

    The interrupt may have come between two steps of Django's own that belong together, and in the
    middle of a statement. So every session is closed, and Django's lists are as they were before.
    """

    def __init__(self) -> None:
        self._before = {each.alias: _State(each) for each in _opened()}

    def close(self) -> None:
        """Cancel what a session is still at, and close it; sends nothing on the session itself."""
        for connection in _opened():
            self._close(connection, self._before.get(connection.alias, _OUTSIDE))

    def _close(self, connection: Any, before: _State) -> None:
        busy = is_busy(connection)
        if busy:
            cancel(connection)
        before.restore(connection)
        if before.is_inside and not busy and any(map(from_test_case, connection.atomic_blocks[:1])):
            # The rows of the test are in this session.
            connection.needs_rollback = False
            return
        # A driver whose session is broken may raise, and then there is nothing left to close.
        with suppress(Exception):
            if connection.vendor == "postgresql" and connection.connection is not None:
                # Not given back to a pool, whose next user would share it with this transaction.
                connection.connection.close()
        with suppress(Exception):
            connection.close()
        if not before.is_inside:
            _forget_transaction(connection)


class _State:
    """Django's lists of a connection."""

    def __init__(self, connection: Any = None) -> None:
        self.is_inside = connection is not None and connection.in_atomic_block
        self._savepoints = len(connection.savepoint_ids) if connection is not None else 0
        self._blocks = len(connection.atomic_blocks) if connection is not None else 0
        self._wrappers = [*connection.execute_wrappers] if connection is not None else []

    def restore(self, connection: Any) -> None:
        del connection.savepoint_ids[self._savepoints :]
        del connection.atomic_blocks[self._blocks :]
        connection.execute_wrappers[:] = self._wrappers
        connection.in_atomic_block = self.is_inside


#: Of a connection that the handler has opened.
_OUTSIDE = _State()


def _opened() -> list[Any]:
    return [*connections.all(initialized_only=True)]


def _forget_transaction(connection: Any) -> None:
    """Let the next statement find no transaction, whatever was in progress."""
    connection.needs_rollback = False
    if connection.closed_in_transaction:
        connection.closed_in_transaction, connection.connection = False, None
    if connection.connection is not None:
        # SQLite in memory, which Django does not close.
        with suppress(Exception):
            connection.connection.rollback()
            connection.set_autocommit(True)
