"""Checks that the transaction that locked the rows is still open.

A transaction can end without Django's knowledge: by a swallowed deadlock on MariaDB, a raw COMMIT
or ROLLBACK, or DDL where it commits. The locks and the work are then gone, and the flip would be
alone in a new transaction that the next statement opens implicitly.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from django.db import Error, connections

from dcl_processor.database.contention import ends_transaction, savepoint_is_gone
from dcl_processor.database.driver import in_transaction, send
from dcl_processor.database.transaction_id import current_transaction_id, has_id
from dcl_processor.exceptions import SessionLost, TransactionLost

_SAVEPOINT = "dcl_fence"


class TransactionGuard:
    """Watches the transaction from the first handler to the flip.

    ``transaction_id``: of the transaction that has the locks; every flip must check it.
    """

    def __init__(self, using: str, transaction_id: str | None = None) -> None:
        self._using = using
        self._connection: Any = connections[using]
        self._lost: Exception | None = None
        # Without an id the guard uses a savepoint, which is gone when its transaction ends; the
        # next transaction has no savepoint of that name.
        self._has_savepoint = not has_id(self._connection)
        self.transaction_id = transaction_id

    def __enter__(self) -> Self:
        if self._has_savepoint:
            self._savepoint("savepoint_create_sql")
        elif self.transaction_id is None:
            # The iterable class of the user's queryset did not pass it on.
            self.transaction_id = current_transaction_id(self._using)
        self._connection.execute_wrappers.append(self._watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch_no_more()

    def check(self) -> None:
        """Raise ``TransactionLost`` if the loss is known; sends nothing."""
        self._look()
        if self._lost is not None:
            raise TransactionLost from self._lost

    def close(self) -> None:
        """Check for the last time, just before the flip, which checks the transaction, too."""
        self._watch_no_more()
        self.check()
        if self._has_savepoint and not self._connection.needs_rollback:
            try:
                self._savepoint("savepoint_commit_sql")
            except Error as error:
                if not savepoint_is_gone(error):
                    raise SessionLost from error
                self._lost = error
                self.check()

    def _watch_no_more(self) -> None:
        # By identity and not by position: a handler may have left a wrapper of its own on top.
        wrappers = self._connection.execute_wrappers
        if wrappers:
            wrappers[:] = [each for each in wrappers if each != self._watch]

    def _look(self) -> None:
        if self._lost is not None:
            return
        if self._connection.closed_in_transaction:
            self._lost = SessionLost()
        elif in_transaction(self._connection) is False:
            self._lost = TransactionLost()

    def _watch(self, execute: Callable[..., Any], *args: Any) -> Any:
        try:
            return execute(*args)
        except Exception as error:
            if ends_transaction(error):
                self._lost = error
            raise
        finally:
            # If this statement ended the transaction, a later one may open a new one and hide that.
            self._look()

    def _savepoint(self, kind: str) -> None:
        sql = getattr(self._connection.ops, kind)(_SAVEPOINT)
        if self._connection.vendor == "sqlite":
            # SQLite runs in this process, where Django's cursor takes longer than the statement.
            send(self._connection, sql)
            return
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
