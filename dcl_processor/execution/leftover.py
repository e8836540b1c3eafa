"""Find and end a transaction that a handler leaves open, before rows are settled inside it.

Later claims and settlements would look committed, and be lost if that transaction is rolled back.
Django and the driver know whether one is open. MariaDB's driver does not know, so there the server
is asked, but only when a statement was sent that can begin a transaction without Django.
"""

from __future__ import annotations

import re
from typing import Any, Self

from django.db import connections

from dcl_processor.database.driver import asked_in_transaction, in_transaction, roll_back
from dcl_processor.exceptions import TransactionLeftOpen
from dcl_processor.locking.isolation import from_test_case

from .handler import Failed, Handled, Outcome

# Looked for at the beginning of a statement, because large values come later.
_BEGINS = re.compile(
    rb"\b(begin|start|xa|autocommit|chain|completion_type|call|execute|immediate)\b", re.IGNORECASE
)
_LOOKED_AT = 500  # bytes


class Leftover:
    """Watches one handler, and ends the transaction that it leaves open."""

    def __init__(self, using: str) -> None:
        self._connection: Any = connections[using]
        self._driver: Any = None
        #: Whether it has to look at what a handler sends; elsewhere the driver knows afterwards.
        self.watches = self._connection.vendor == "mysql"
        self._may_have_begun = False

    def __enter__(self) -> Self:
        if self.watches and self._connection.connection is not None:
            self._driver = self._connection.connection
            self._driver.query = self._query
        return self

    def __exit__(self, *raised: object) -> None:
        if self._driver is not None:
            vars(self._driver).pop("query", None)

    def judge(self, outcome: Outcome) -> Outcome:
        """End the transaction that was left open; return the row's outcome."""
        if not self.end() or not isinstance(outcome, Handled):
            return outcome
        return Failed(TransactionLeftOpen(), handled=True, duration=outcome.duration)

    def judge_all(self, outcomes: dict[Any, Outcome]) -> dict[Any, Outcome]:
        """Do the same for the rows of one call, whose outcomes are given by key."""
        if not self.end():
            return outcomes
        left = Failed(TransactionLeftOpen(), handled=True)
        return {pk: left if isinstance(each, Handled) else each for pk, each in outcomes.items()}

    def end(self) -> bool:
        """Roll back the open transaction, if there is one; return whether there was."""
        connection = self._connection
        if not self.may_be_left() or not self._is_left():
            return False
        if any(map(from_test_case, connection.atomic_blocks[:1])):
            return False
        roll_back(connection)
        self._may_have_begun = False
        return True

    @property
    def connection(self) -> Any:
        """The connection that is watched."""
        return self._connection

    def may_be_left(self) -> bool:
        """Return whether a transaction may be open; sends nothing, and may be called anywhere."""
        connection = self._connection
        driver = connection.connection
        if driver is None or getattr(driver, "closed", False):
            return False
        if connection.in_atomic_block or not connection.autocommit:
            return True
        known = in_transaction(connection)
        return self._may_have_begun if known is None else known

    def _is_left(self) -> bool:
        """Return whether the transaction that may be open is open."""
        connection = self._connection
        if connection.in_atomic_block or not connection.autocommit or not self._may_have_begun:
            return True
        self._may_have_begun = asked_in_transaction(connection)
        return self._may_have_begun

    def _query(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        start = query[:_LOOKED_AT]
        if _BEGINS.search(start if isinstance(start, bytes) else start.encode()):
            self._may_have_begun = True
        return type(self._driver).query(self._driver, query, *args, **kwargs)
