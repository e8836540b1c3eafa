"""One row's work in a transaction: kept, or rolled back without the other rows' work.

PostgreSQL releases all locks of a transaction at the moment of an error, before any ROLLBACK: a
handler that catches an error and goes on would work on a row that another worker can claim. Behind
a savepoint the lock stays. A savepoint for every row costs several times what a batch saves, and
most handlers use the database little or not at all. So the savepoint is created before the
handler's first statement, as ``execute_wrapper()`` shows it: what goes past that, such as
``cursor.copy()`` or the driver's own cursor, has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import DatabaseError
from django.db.transaction import TransactionManagementError

from dcl_processor.database.contention import savepoint_is_gone
from dcl_processor.exceptions import TransactionLost

from .handler import Failed, Handled, Outcome

_SAVEPOINT = "dcl_row"


class RowSavepoint:
    """Watches the handlers of a lane use the transaction, and keeps or rolls back a row's work."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._callbacks = 0
        self._watches = self._open = False

    def begin(self) -> None:
        """Watch for the first statement of the next row's handler; ``end()`` has to follow."""
        self._open, self._callbacks = False, len(self._connection.run_on_commit)
        if not self._watches:  # or the last handler has sent nothing
            # Before all others, whose own statements it has to precede.
            self._connection.execute_wrappers.insert(0, self._before_first)
            self._watches = True

    def end(self) -> None:
        """Watch no more."""
        wrappers, self._watches = self._connection.execute_wrappers, False
        # By identity and not by position: a handler may have left a wrapper of its own on top.
        wrappers[:] = [each for each in wrappers if each != self._before_first]

    def close(self, outcome: Outcome, *, alone: bool = False) -> Outcome:
        """Keep the row's work if it was handled, or roll it back; return the row's outcome.

        Called before the row is written, because a savepoint around the flip would make
        PostgreSQL keep a list of lockers for each row. ``alone``: nothing else in the transaction
        must be kept.
        """
        if isinstance(outcome, Handled) or getattr(outcome, "kept", False):
            if not self._connection.needs_rollback:
                if self._open:
                    self._savepoint("savepoint_commit_sql")
                return outcome
            outcome = _rollback_was_asked_for()
        self.end()
        if alone:
            self._connection.set_rollback(True)
        else:
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
            with self._connection.cursor() as cursor:
                cursor.execute(getattr(self._connection.ops, kind)(_SAVEPOINT))
        except DatabaseError as error:
            if savepoint_is_gone(error):
                raise TransactionLost from error
            raise

    # Race: double claim. An error that the handler catches would release the lock of its row.
    def _before_first(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        self.end()
        # Not connection.savepoint(): its ids are those of the handler's own atomic blocks, and
        # on_commit() would tie the handler's callbacks to this savepoint.
        self._savepoint("savepoint_create_sql")
        self._open = True
        return execute(*arguments)


def _rollback_was_asked_for() -> Failed:
    asked = TransactionManagementError("the handler marked the transaction for rollback")
    return Failed(asked, handled=True)
