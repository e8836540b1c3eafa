"""One row's work in a transaction: kept, or rolled back without the other rows' work.

A savepoint for every row of a batch costs several times what the batch saves. Most handlers that
run in batches use the database little or not at all, so the savepoint is created only when the
handler opens a cursor, or sends a statement through the driver itself. With a driver that cannot be
watched each row begins with its savepoint; on SQLite, to which no message is sent, that is cheap.
"""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError
from django.db.transaction import TransactionManagementError

from dcl_processor.database.contention import savepoint_is_gone
from dcl_processor.database.driver import Sending, send
from dcl_processor.exceptions import TransactionLost

from .handler import Failed, Handled, Outcome

_SAVEPOINT = "dcl_row"


class RowSavepoint:
    """Watches the handlers of a lane use the transaction, and keeps or rolls back a row's work."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._callbacks = 0
        self._sending: Sending | None = None
        self._open = False

    def begin(self) -> None:
        """Watch for the first statement of the next row's handler; ``end()`` has to follow."""
        connection = self._connection
        self._open, self._callbacks = False, len(connection.run_on_commit)
        if self._sending is not None:
            return  # the last handler has sent nothing
        self._sending = Sending(connection, self._before_sending)
        if not self._sending.is_seen:
            self._begin()
            return
        self._sending.start()
        # Where cursors are created, so that Django sends the savepoint itself if possible.
        connection._cursor = self._first_cursor  # noqa: SLF001  # the only such place

    def end(self) -> None:
        """Watch no more."""
        if self._sending is not None:
            self._sending.stop()
            self._sending = None
        vars(self._connection).pop("_cursor", None)

    def close(self, outcome: Outcome) -> Outcome:
        """Keep the row's work if it was handled, or roll it back; return the row's outcome.

        Called before the row is written, because a savepoint around the flip would make
        PostgreSQL keep a list of lockers for each row.
        """
        if isinstance(outcome, Handled) or getattr(outcome, "kept", False):
            if not self._connection.needs_rollback:
                if self._open:
                    self._savepoint("savepoint_commit_sql")
                return outcome
            outcome = _rollback_was_asked_for()
        self.end()
        self._undo()
        return outcome

    def _undo(self) -> None:
        # The handler called set_rollback(True): roll back this row only.
        self._connection.set_rollback(False)
        if self._open:
            self._savepoint("savepoint_rollback_sql")
            self._savepoint("savepoint_commit_sql")
        del self._connection.run_on_commit[self._callbacks :]

    def _savepoint(self, kind: str) -> None:
        try:
            self._execute(kind)
        except DatabaseError as error:
            if savepoint_is_gone(error):
                raise TransactionLost from error
            raise

    def _execute(self, kind: str) -> None:
        connection = self._connection
        sql = getattr(connection.ops, kind)(_SAVEPOINT)
        if connection.vendor == "sqlite":
            send(connection, sql)  # a cursor of Django's costs more than the savepoint
            return
        with connection.cursor() as cursor:
            cursor.execute(sql)

    def _first_cursor(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        return self._connection._cursor(*args, **kwargs)  # noqa: SLF001  # Django's own again

    def _before_sending(self) -> None:
        self.end()
        send(self._connection, self._connection.ops.savepoint_create_sql(_SAVEPOINT))
        self._open = True

    def _begin(self) -> None:
        self.end()
        # Not connection.savepoint(): its ids are those of the handler's own atomic blocks, and
        # on_commit() would tie the handler's callbacks to this savepoint.
        self._execute("savepoint_create_sql")
        self._open = True


def alone(connection: Any, outcome: Outcome) -> Outcome:
    """Do what ``close()`` does for a row whose transaction has nothing else that must be kept."""
    if isinstance(outcome, Handled) or getattr(outcome, "kept", False):
        return _rollback_was_asked_for() if connection.needs_rollback else outcome
    connection.set_rollback(True)
    return outcome


def _rollback_was_asked_for() -> Failed:
    asked = TransactionManagementError("the handler marked the transaction for rollback")
    return Failed(asked, handled=True)
