"""Tells whether the transaction that locked the rows is still the one that is open.

A transaction can end behind Django's back: a swallowed deadlock on MariaDB, a raw COMMIT or
ROLLBACK, DDL where it commits. The locks and the work are gone then, and a flip would be alone in
a new transaction that the next statement opens by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from django.db import DatabaseError, connections

from dcl_processor.exceptions import TransactionLost

from .contention import ends_transaction

_SAVEPOINT = "dcl_fence"
_IDLE = 0  # libpq's PQTRANS_IDLE

_IS_OPEN: dict[str, Callable[[Any], bool]] = {
    "postgresql": lambda driver: driver.pgconn.transaction_status != _IDLE,
    "sqlite": lambda driver: driver.in_transaction,
}


class Fence:
    """Watches the transaction from the first handler to the flip."""

    def __init__(self, using: str) -> None:
        self._connection: Any = connections[using]
        self._lost: Exception | None = None
        # The drivers of PostgreSQL and SQLite are told whether a transaction is open. MariaDB's is
        # not: there a savepoint that is gone tells of the transaction that it was in.
        self._is_open = _IS_OPEN.get(self._connection.vendor)
        self._needs_savepoint = self._is_open is None

    def __enter__(self) -> Self:
        if self._needs_savepoint:
            self._savepoint("savepoint_create_sql")
        self._connection.execute_wrappers.append(self._watch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # By identity, and wherever it is: a handler may have left a wrapper of its own on top.
        wrappers = self._connection.execute_wrappers
        wrappers[:] = [each for each in wrappers if each != self._watch]

    def check(self) -> None:
        """Raise ``TransactionLost`` if that is known; sends nothing."""
        self._look()
        if self._lost is not None:
            raise TransactionLost from self._lost

    def close(self) -> None:
        """Ask for the last time, just before the flip."""
        if self._needs_savepoint and not self._connection.needs_rollback:
            try:
                self._savepoint("savepoint_commit_sql")
            except DatabaseError as error:
                self._lost = error
        self.check()

    def _look(self) -> None:
        if self._is_open is None or self._lost is not None:
            return
        driver = self._connection.connection
        if driver is None or not self._is_open(driver):
            self._lost = TransactionLost()

    def _watch(self, execute: Callable[..., Any], *args: Any) -> Any:
        try:
            return execute(*args)
        except Exception as error:
            if ends_transaction(error):
                self._lost = error
            raise
        finally:
            # A later statement may open a new transaction, and hide that this one ended it.
            self._look()

    def _savepoint(self, kind: str) -> None:
        sql = getattr(self._connection.ops, kind)(_SAVEPOINT)
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
