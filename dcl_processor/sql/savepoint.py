"""One row's work in a transaction: kept, or rolled back without the other rows' work.

PostgreSQL releases all locks of a transaction when a statement fails, also that of the row, and a
handler that catches the error would go on with a row that others may take. Behind a savepoint the
lock stays.

One that is sent for every row of a batch costs several times what the batch saves, so it is created
when the handler sends its first statement through Django.
"""

from __future__ import annotations

from typing import Any

from django.db import Error
from django.db.transaction import TransactionManagementError

from dcl_processor.report.exceptions import TransactionLost
from dcl_processor.report.outcomes import Failed, Outcome
from dcl_processor.sql.errors import NO_TRANSACTION, code_of

NAME = "dcl_row"


class RowSavepoint:
    """Keeps or rolls back the work of the rows of a transaction, one after another.

    As a wrapper of Django's cursors it precedes a row's first statement. ``sent``: the
    name of the one that the claim has created, and that is released before the flip.
    """

    def __init__(self, connection: Any, *, sent: str | None) -> None:
        self._connection, self._name, self._is_sent = connection, sent or NAME, bool(sent)
        self._callbacks, self._is_open, self._is_opening = 0, bool(sent), False
        if not sent:
            connection.execute_wrappers.append(self)

    def begin(self) -> None:
        """Begin a row."""
        self._is_open, self._callbacks = self._is_sent, len(self._connection.run_on_commit)

    def __call__(self, execute: Any, *statement: Any) -> Any:
        if not (self._is_open or self._is_opening):
            self._is_opening = True
            try:
                self._execute("savepoint_create_sql")
                self._is_open = True
            except Error as error:
                if code_of(error) == NO_TRANSACTION:
                    raise TransactionLost from error
                raise
            finally:
                self._is_opening = False
        return execute(*statement)

    def end(self) -> None:
        """End the last row."""
        if self in self._connection.execute_wrappers:
            self._connection.execute_wrappers.remove(self)

    def close(self, outcome: Outcome) -> Outcome:
        """Keep the row's work if it was handled, or roll it back; return the row's outcome.

        Called before the row is written, because a savepoint around the flip would make
        PostgreSQL keep a list of lockers for each row.
        """
        if outcome.kept and self._connection.needs_rollback:
            error = TransactionManagementError("the handler marked the transaction for rollback")
            outcome = Failed(error, handled=True)
        is_kept = outcome.kept
        if not is_kept:
            self._connection.set_rollback(False)
            del self._connection.run_on_commit[self._callbacks :]
        try:
            if self._is_open and not is_kept:
                self._execute("savepoint_rollback_sql")
            if self._is_open and not self._is_sent:
                self._execute("savepoint_commit_sql")
        except Error as error:
            raise TransactionLost from error  # with the savepoint
        return outcome

    def _execute(self, kind: str) -> None:
        connection = self._connection
        with connection.cursor() as cursor:
            cursor.execute(getattr(connection.ops, kind)(connection.ops.quote_name(self._name)))
