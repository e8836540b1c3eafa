"""One row's work in a transaction: kept, or rolled back without the other rows' work.

A savepoint for every row of a batch costs several times what the batch saves. Most handlers that
run in batches use the database little or not at all, so with psycopg 3 the savepoint is created
when the handler sends its first statement, through Django or through the driver itself.
"""

from __future__ import annotations

from typing import Any

from django.db import Error
from django.db.transaction import TransactionManagementError

from dcl_processor.core.report.exceptions import TransactionLost
from dcl_processor.core.report.outcomes import Failed, Handled, Outcome

_SAVEPOINT = "dcl_row"


class RowSavepoint:
    """Keeps or rolls back the work of the rows of a transaction, one after another."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        #: The driver's connection, if everything that it sends passes a method of its own.
        self._driver = connection.connection if hasattr(connection.connection, "pgconn") else None
        self._callbacks = 0
        self._is_open = False

    def begin(self) -> None:
        """Begin a row: its first statement is preceded by a savepoint."""
        self._is_open, self._callbacks = False, len(self._connection.run_on_commit)
        if self._driver is None:
            self._execute("savepoint_create_sql")
            self._is_open = True
        else:
            self._driver.wait = self._first
            # Where cursors are created, so that Django sends the savepoint itself if possible.
            self._connection._cursor = self._first_cursor  # noqa: SLF001

    def _first_cursor(self, *args: Any, **kwargs: Any) -> Any:
        self.end()
        self._execute("savepoint_create_sql")
        self._is_open = True
        return self._connection._cursor(*args, **kwargs)  # noqa: SLF001

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """Send the savepoint before what the handler sends, in the place of the driver's method."""
        self.end()
        # Not through a cursor: its lock is held by whoever is about to send.
        self._driver.pgconn.exec_(f'SAVEPOINT "{_SAVEPOINT}"'.encode())
        self._is_open = True
        return self._driver.wait(*args, **kwargs)

    def end(self) -> None:
        """Watch no more."""
        if self._driver is not None:
            vars(self._driver).pop("wait", None)
            vars(self._connection).pop("_cursor", None)

    def close(self, outcome: Outcome) -> Outcome:
        """Keep the row's work if it was handled, or roll it back; return the row's outcome.

        Called before the row is written, because a savepoint around the flip would make
        PostgreSQL keep a list of lockers for each row.
        """
        self.end()
        outcome = asked_for_rollback(self._connection, outcome)
        is_kept = isinstance(outcome, Handled) or getattr(outcome, "kept", False)
        if not is_kept:
            self._connection.set_rollback(False)
        if self._is_open:
            try:
                if not is_kept:
                    self._execute("savepoint_rollback_sql")
                self._execute("savepoint_commit_sql")
            except Error as error:
                raise TransactionLost from error  # with the savepoint
        if not is_kept:
            del self._connection.run_on_commit[self._callbacks :]
        return outcome

    def _execute(self, kind: str) -> None:
        connection = self._connection
        with connection.cursor() as cursor:
            cursor.execute(getattr(connection.ops, kind)(connection.ops.quote_name(_SAVEPOINT)))


def asked_for_rollback(connection: Any, outcome: Outcome) -> Outcome:
    """Return the outcome of a row whose handler may have called ``set_rollback(True)``."""
    is_kept = isinstance(outcome, Handled) or getattr(outcome, "kept", False)
    if not (is_kept and connection.needs_rollback):
        return outcome
    error = TransactionManagementError("the handler marked the transaction for rollback")
    return Failed(error, handled=True)
