"""One connection, and the messages that a lane sends on it.

PostgreSQL executes the statements of one message one by one, each with a snapshot of its own, and
an error skips the rest of the message, a COMMIT included. So the BEGIN and the claim are one round
trip, and so are the flips and the COMMIT. Only psycopg 3 with client-side binding sends such
messages and reports each answer. Elsewhere, and while other code looks at each statement, every
statement is a message of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from django.db import DataError, Error, connections
from django.db.transaction import Atomic, atomic

from dcl_processor import steady as time
from dcl_processor.compiled_sql.claims import PartlyRead
from dcl_processor.database.connection import has_id, has_news, reconnected
from dcl_processor.database.contention import ends_transaction, savepoint_is_gone
from dcl_processor.database.driver import forget_transaction, in_transaction
from dcl_processor.exceptions import SessionLost, TransactionLost
from dcl_processor.execution.leftover import Leftover
from dcl_processor.locking.isolation import ReadCommitted, refuse_unknown_transaction

from .settlement import BEGIN, ROLLBACK, Answer, NotSettled, Settlement, Statement

logger = logging.getLogger("dcl_processor")

#: A savepoint that is gone when its transaction ends, where transactions have no id.
_FENCE = "dcl_fence"

#: Seconds for which the server is asked about a transaction that it has not ended yet.
ASK_FOR = 5.0


class Session:
    """The connection of one lane, and the transaction that is open on it, if one is."""

    def __init__(self, using: str, label: str) -> None:
        self.using = using
        self._label = label
        self.connection: Any = connections[using]
        # A handler's own durable block is refused inside it.
        self._atomic = Atomic(using, savepoint=True, durable=True)
        #: Django's block around a transaction whose statements are sent one by one.
        self._block: ReadCommitted | None = None
        #: Whether a transaction was begun whose statements are sent one by one.
        self._has_begun = False
        self._deadlock: Exception | None = None
        #: Whether a transaction is open on it whose statements are sent in messages.
        self.is_open = False
        #: The driver's connection that is known to send several statements as one message.
        self._combining: Any = None

    @property
    def combines(self) -> bool:
        """Whether several statements may be one message, if no transaction is open."""
        connection = self.connection
        # Django's TestCase keeps a transaction open.
        if connection.in_atomic_block:
            return False
        if connection.execute_wrappers and is_observed(connection):
            return False
        driver = connection.connection
        if driver is not self._combining:
            if not can_combine(connection):
                return False
            self._combining = driver
        return True

    def begin(self, statements: Sequence[Statement]) -> list[Answer]:
        """Open a transaction and execute the statements in it; return their answers.

        Raises what the database raises; no transaction is open then.
        """
        self.connection.ensure_connection()
        if not self.combines:
            return self._begin_alone(statements)
        return self._send([BEGIN, *statements], opens=True)[1:]

    def exchange(self, statement: Statement) -> Answer:
        """Execute one statement as a transaction; return its answer."""
        connection = self.connection
        # An error must not break the transaction that Django's TestCase keeps open.
        with atomic(using=self.using) if connection.in_atomic_block else nullcontext():
            return self.execute(statement)

    def _begin_alone(self, statements: Sequence[Statement]) -> list[Answer]:
        if not self._has_begun:
            refuse_unknown_transaction(self.using, self._label)
            self._has_begun = True
        block = ReadCommitted(self.using)
        block.__enter__()
        self._block, self._deadlock = block, None
        if self.connection.vendor == "mysql":
            self.connection.execute_wrappers.append(self._notice)
        try:
            answers = [self.execute(each) for each in statements]
            if not has_id(self.connection):
                self.execute(Statement(f"SAVEPOINT {_FENCE}"))
        except BaseException:
            self.rollback()
            raise
        return answers

    def settle(self, after: Settlement) -> None:
        """Send the end of a transaction; raises ``NotSettled``."""
        if after.statements[-1] == ROLLBACK and self.is_open:
            self.connection.run_on_commit = []
        if self._block is not None:
            self._commit_alone(after)
        else:
            try:
                after.answers = self._send(after.statements, closes=True)
            except BaseException as error:
                raise NotSettled from error
        if self.connection.run_on_commit and not self.connection.in_atomic_block:
            self.connection.run_and_clear_commit_hooks()

    def _notice(self, execute: Callable[..., Any], *arguments: Any) -> Any:
        """Notice a deadlock, by which the server ends the transaction; a handler may hide it."""
        try:
            return execute(*arguments)
        except Exception as error:
            if ends_transaction(error):
                self._deadlock = error
            raise

    def _end_block(self) -> ReadCommitted | None:
        block, self._block = self._block, None
        wrappers = self.connection.execute_wrappers
        # By identity and not by position: a handler may have left a wrapper of its own on top.
        wrappers[:] = [each for each in wrappers if each != self._notice]
        return block

    def _commit_alone(self, after: Settlement) -> None:
        block = self._end_block()
        assert block is not None
        if after.statements[-1] == ROLLBACK:
            self.connection.set_rollback(True)
        try:
            block.__exit__(None, None, None)
        except BaseException as error:
            raise NotSettled from error
        after.answers = ()

    def rollback(self) -> None:
        """End the transaction that is open, if one is; its callbacks never run."""
        connection, block = self.connection, self._end_block()
        if block is not None:
            # Not set_rollback(), which a handler that has reconnected makes fail.
            connection.needs_rollback = True
            with suppress(Error):  # a session that is lost has nothing to roll back
                block.__exit__(None, None, None)
        elif self.is_open:
            self._leave()
            connection.run_on_commit = []
            try:
                if in_transaction(connection):
                    self.execute(ROLLBACK)
            except Error:
                connection.close()
        if connection.in_atomic_block:
            # An interrupt came before its end.
            Leftover(self.using).end()

    def check(self) -> None:
        """Raise ``TransactionLost`` if the transaction with the locks is known to have ended."""
        connection = self.connection
        if self._deadlock is not None:
            raise TransactionLost from self._deadlock
        if connection.closed_in_transaction:
            raise TransactionLost from SessionLost()
        if in_transaction(connection) is False:
            raise TransactionLost

    def check_before_next(self) -> None:
        """Do the same before the handler of a batch's next row, for a server that has gone away."""
        if has_news(self.connection.connection) and not self.connection.is_usable():
            raise TransactionLost from SessionLost()

    def check_for_the_last_time(self) -> None:
        """Do the same just before the flips; elsewhere each flip has the transaction's id."""
        self.check()
        if self._block is None or has_id(self.connection) or self.connection.needs_rollback:
            return
        try:
            self.execute(Statement(f"RELEASE SAVEPOINT {_FENCE}"))
        except Error as error:
            if savepoint_is_gone(error):
                raise TransactionLost from error
            raise SessionLost from error

    def execute(self, statement: Statement) -> Answer:
        """Execute a statement in a message of its own; return its answer."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement.sql, statement.params or None)
            try:
                return cursor.fetchall() if cursor.description else cursor.rowcount
            except Exception as error:  # noqa: BLE001  # raised again if the server has raised it
                return _partly_read(cursor.cursor, error)

    def execute_all(self, statements: Sequence[Statement]) -> Sequence[Answer]:
        """Execute statements, in the transaction that is open if one is, as one if possible."""
        if len(statements) > 1 and (self.is_open or self.combines):
            return self._send(statements)
        return [self.execute(each) for each in statements]

    def _send(
        self, statements: Sequence[Statement], *, opens: bool = False, closes: bool = False
    ) -> list[Answer]:
        """Send one message; return its answers."""
        connection = self.connection
        # A rollback that was asked for is the settlement's last statement.
        connection.needs_rollback = False
        try:
            with connection.cursor() as cursor:
                answers = send_together(cursor, statements)
        except BaseException:
            if not closes:  # or it is found out what became of it
                self.is_open = self.is_open or opens
                self.rollback()
            raise
        if opens:
            # Django is to know that a transaction is open: what a handler calls depends on it.
            self.is_open = connection.in_atomic_block = connection.commit_on_exit = True
            connection.autocommit = connection.needs_rollback = False
            # Without those that a handler has left open.
            connection.savepoint_ids, connection.atomic_blocks = [], [self._atomic]
        elif closes:
            self._leave()
        return answers

    def _leave(self) -> None:
        self.is_open, self.connection.autocommit = False, True
        forget_transaction(self.connection)

    def was_committed(self, transaction_id: str | None) -> bool:
        """Return whether a transaction was committed although an error came; PostgreSQL only."""
        if transaction_id is None:
            return False
        end = time.monotonic() + ASK_FOR
        while True:
            try:
                asked = Statement("SELECT pg_xact_status(%s::xid8)", [transaction_id])
                [[status]] = self.execute(asked)
            except Error:
                if not reconnected(self.using):
                    return False
                continue
            if status != "in progress" or time.monotonic() > end:
                return bool(status == "committed")
            time.sleep(0.05)


def can_combine(connection: Any) -> bool:
    """Return whether the driver sends several statements as one message, with all answers."""
    driver, client = connection.connection, getattr(connection.Database, "ClientCursor", None)
    return (
        client is not None
        and driver is not None
        and connection.vendor == "postgresql"
        # What has replaced it, as a cache of queries does, has to see each transaction.
        and Atomic.__enter__.__globals__["__name__"] == Atomic.__module__
        and issubclass(driver.cursor_factory, client)
    )


def is_observed(connection: Any) -> bool:
    """Return whether other code looks at each statement that this connection executes."""
    return bool(connection.execute_wrappers)


def is_usable(connection: Any) -> bool:
    """Return whether the session is still there, after an error."""
    return connection.connection is not None and connection.is_usable()


def in_one_message(cursor: Any, statements: Sequence[Statement]) -> list[Answer]:
    """Send the statements together; return their answers."""
    params = [each for one in statements for each in one.params]
    cursor.execute("; ".join([each.sql for each in statements]), params)
    # The driver's own cursor: its description would describe each column again for each row.
    driver, answers = cursor.cursor, list[Answer]()
    with cursor.db.wrap_database_errors:
        for _ in statements:
            try:
                answers.append(driver.fetchall() if driver.pgresult.nfields else driver.rowcount)
            except Exception as error:  # noqa: BLE001  # as above
                answers.append(_partly_read(driver, error))
            driver.nextset()
    return answers


def _partly_read(driver: Any, error: Exception) -> PartlyRead:
    """Return the answer of a statement that was executed; its rows are not built later."""
    result = getattr(driver, "pgresult", None)
    # An error of the server has a code; one without comes from a value, such as 'infinity'.
    if result is None or getattr(error.__cause__ or error, "sqlstate", "") is not None:
        raise error
    from psycopg.adapt import Transformer

    find, columns = Transformer.from_context(driver).get_loader, range(result.nfields)

    def value(row: int, column: int) -> Any:
        data = result.get_value(row, column)
        with suppress(Exception):
            if data is not None:
                return find(result.ftype(column), result.fformat(column)).load(data)
        return None

    found = PartlyRead(tuple([value(row, at) for at in columns]) for row in range(result.ntuples))
    found.error = error if error.__cause__ else DataError(*error.args)
    return found


#: How the statements of a message are sent: a test kit interleaves them with other sessions'.
send_together = in_one_message
