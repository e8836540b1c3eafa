"""The transactions of one thread's rows, one after another, with as few messages as possible.

A row that is settled has two statements left that return nothing: its flip, and the COMMIT. They
wait here, and are sent in one message with the next row's BEGIN and claim: one round trip for each
row. PostgreSQL executes the statements of such a message one by one, and each takes a snapshot of
its own, so that a claim in it sees what was committed before. An error skips the rest of the
message, the COMMIT included. Until the message is answered the row is unconfirmed: a process that
dies before the answer leaves the same state as one that dies before its COMMIT.

Where the claim is committed before the work, a row's settlement is the only statement left. It
waits for the claim of the next row. PostgreSQL makes the two one transaction, because they are one
message without a BEGIN: both are committed by one COMMIT, or neither is.

Only psycopg 3 with client-side binding sends several statements in one message, and reports the
result of each. Elsewhere nothing waits, and each statement is a message. So it is while code of
others has an ``execute_wrapper()``, which expects one statement and its parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from django.db import Error, connections, transaction

from dcl_processor.interrupts import ends_the_run

from .isolation import ReadCommitted, from_test_case

Rows = list[tuple[Any, ...]]


class Statement(NamedTuple):
    """A statement, its parameters, and what to call with the cursor that has its answer.

    ``text``: the statement with its parameters filled in.
    """

    sql: str
    params: Sequence[Any] | None
    answered: Callable[[Any], None] | None
    text: str


class NotSentError(Exception):
    """A claim was not executed, because what waited for it failed; it may be sent again."""


def _without_answer(sql: str) -> Statement:
    return Statement(sql, None, None, sql)


_BEGIN, _COMMIT = map(_without_answer, ("BEGIN ISOLATION LEVEL READ COMMITTED", "COMMIT"))


class RowTransactions(threading.local):
    """Begins and ends the transactions of rows; each thread has its own.

    Used as a context manager around one row's transaction, after ``using`` was called.
    ``confirmed``: called with an owner when what waited for it was answered, with the driver's
    connection that it waited on, and with the error of its message, if any.
    """

    def __init__(self, confirmed: Callable[[Any, Any, BaseException | None], None]) -> None:
        self._confirmed = confirmed
        #: Django's block around the rows' transactions; ``None``: no transaction is open.
        self._block: ReadCommitted | None = None
        self._connection: Any = None
        #: The driver's, of that connection.
        self._cursor: Any = None
        #: The flips and the COMMIT of an unconfirmed row, or its settlement.
        self._before: list[Statement] = []
        #: What waits in the transaction that is open now: its BEGIN, or its flips.
        self._now: list[Statement] = []
        self._is_inside = False
        #: Of the unconfirmed row, or of the row whose flips wait.
        self._session: Any = None
        self._owner: Any = None
        #: The owner of the COMMIT or the settlement that waits to be sent, if there is one.
        self.unconfirmed: Any = None

    def using(self, alias: str) -> Self:
        """Use the connection of this alias for the next transaction."""
        self._connection = connections[alias]
        return self

    def __enter__(self) -> Self:
        self._is_inside = True
        if self._block is not None:
            self._join_next()
            self._now.append(_BEGIN)
            return self
        try:
            self._begin()
        except BaseException:
            self._is_inside = False
            raise
        return self

    def _begin(self) -> None:
        self._block = ReadCommitted(self._connection.alias)
        try:
            self._block.__enter__()
        except BaseException:
            self._block = None
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_inside = False
        if self._before:
            # Nothing was sent in this transaction, not even its BEGIN.
            self._now = []
            if kind is not None:
                self.confirm()
        elif kind is None and self._now:
            self._before, self._now = [*self._now, _COMMIT], []
            self.unconfirmed = self._owner
        else:
            self._stop_waiting()
            block, self._block = self._block, None
            if block is not None:
                block.__exit__(kind, error, trace)

    @contextmanager
    def one_statement(self, alias: str) -> Iterator[None]:
        """Send what waits with the statement of this block, as one transaction of their own."""
        self.using(alias)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @property
    def can_wait(self) -> bool:
        """Whether flips of the open transaction may be sent later, with its COMMIT."""
        connection = self._connection
        return (
            self._block is not None
            and sends_several(self._connection, self)
            # The handler's own: a block that it left open, a callback, and a rollback it asked for.
            and len(connection.atomic_blocks) == 1
            and not connection.run_on_commit
            and not connection.needs_rollback
            and not any(map(from_test_case, connection.atomic_blocks))
        )

    @property
    def can_settle_later(self) -> bool:
        """Whether a settlement may be sent with the next claim: no transaction is open."""
        return sends_several(self._connection, self) and bool(self._connection.get_autocommit())

    def wait(self, flips: Sequence[tuple[str, Sequence[Any]]], *, owner: Any) -> None:
        """Let flips wait for the COMMIT; each must fail if it does not write its rows.

        Raises the driver's error if a parameter cannot be sent.
        """
        statements = [self._filled(*flip) for flip in flips]
        self._owner, self._session = owner, self._connection.connection
        self._join_next()
        self._now += statements

    def settle_later(
        self,
        statement: tuple[str, Sequence[Any]],
        answered: Callable[[Any], None],
        *,
        owner: Any,
    ) -> None:
        """Let a settlement wait for the next claim; ``answered`` gets a cursor with its answer.

        Raises the driver's error if a parameter cannot be sent.
        """
        filled = self._filled(*statement, answered)
        self._owner, self._session = owner, self._connection.connection
        self._join_next()
        self._before = [filled]
        self.unconfirmed = owner

    def _filled(
        self,
        sql: str,
        params: Sequence[Any] | None,
        answered: Callable[[Any], None] | None = None,
    ) -> Statement:
        if params is None:
            return Statement(sql, None, answered, sql)
        driver = self._connection.connection
        with self._connection.wrap_database_errors:
            # Kept, because it only fills in parameters: a new one for each row costs more.
            if self._cursor is None or self._cursor.connection is not driver or driver.closed:
                self._cursor = driver.cursor()
            return Statement(sql, params, answered, self._cursor.mogrify(sql, params))

    def answers(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[Rows] | None:
        """Send the statements as one message, and return the rows of each.

        ``None``: nothing was sent, because each has to be a message of its own.
        """
        if not sends_several(self._connection, self):
            return None
        *earlier, (sql, params) = statements
        answers: list[Rows] = []
        filled = [
            self._filled(*each, lambda cursor: answers.append(cursor.fetchall()))
            for each in earlier
        ]
        self._join_next()
        self._now += filled
        with self._connection.cursor() as cursor:
            cursor.execute(sql, params)
            answers.append(cursor.fetchall())
        return answers

    def confirm(self) -> None:
        """Send what waits, and leave Django's block."""
        if not self._before:
            return
        statements = self._before
        send = send_all if sends_several(self._connection, self) else one_by_one
        try:
            self._stop_waiting()
            with self._connection.cursor() as cursor:
                send(cursor.execute, cursor, statements)
                if (answered := statements[-1].answered) is not None:
                    answered(cursor)
            self._leave(None)
        except BaseException as error:
            self._undo(error)
            if ends_the_run(error):
                raise
        else:
            self._tell(None)

    def close(self) -> None:
        """Send what waits; roll back a transaction that an interrupt left open."""
        connection = self._connection
        if connection is None:
            return
        self.confirm()
        self._stop_waiting()
        self._cursor = None
        if self._block is not None:
            transaction.set_rollback(True, connection.alias)
            self._leave(None)

    def _join_next(self) -> None:
        """Join what waits to the next statement that is sent."""
        if not self._before and not self._now:
            # Outermost, so that other wrappers see the whole message.
            self._connection.execute_wrappers.insert(0, self._with_next)

    def _stop_waiting(self) -> None:
        self._before, self._now, self.unconfirmed = [], [], None
        wrappers = self._connection.execute_wrappers
        if wrappers:
            wrappers[:] = [each for each in wrappers if each != self._with_next]

    def _with_next(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        """Send what waits together with the next statement, whichever code executes it."""
        if not self._is_inside or not sends_several(self._connection, self):
            # Not a row's statement: it must not be executed in a row's transaction.
            begins = self._is_inside and self._block is not None
            self.confirm()
            if begins:
                self._begin()
            return execute(sql, params, many, context)
        before, now = self._before, self._now
        try:
            statements = [*before, *now, self._filled(sql, params)]
        except Exception:
            self.confirm()  # the error is that of the statement alone
            raise
        try:
            self._stop_waiting()
            cursor = context["cursor"]
            result = send_all(lambda *each: execute(*each, many, context), cursor, statements)
        except BaseException as error:
            if not before:
                raise
            self._undo(error)
            if ends_the_run(error):
                raise
            raise NotSentError from error
        if before:
            self._tell(None)
        return result

    def _undo(self, error: BaseException) -> None:
        """Leave Django's block by an error, and tell the owner of what waited."""
        self._stop_waiting()  # in case of an interrupt before
        try:
            with suppress(Error):  # there is no new connection either: the first error says why
                self._leave(error)
        finally:
            self._tell(error)

    def _leave(self, error: BaseException | None) -> None:
        block, self._block = self._block, None
        if block is not None:
            block.__exit__(type(error) if error else None, error, None)

    def _tell(self, error: BaseException | None) -> None:
        owner, self._owner = self._owner, None
        self._confirmed(owner, self._session, error)


#: Executes a statement with its parameters.
Send = Callable[[str, Any], Any]


def in_one_message(send: Send, cursor: Any, statements: Sequence[Statement]) -> Any:
    """Send the statements together; leave the cursor at the result of the last one."""
    result = send("; ".join([each.text for each in statements]), None)
    for each in statements[:-1]:
        if each.answered is not None:
            each.answered(cursor)
        cursor.nextset()
    return result


def one_by_one(send: Send, cursor: Any, statements: Sequence[Statement]) -> Any:
    """Send each statement in its own message; leave the cursor at the result of the last one."""
    *earlier, last = statements
    for each in earlier:
        send(each.sql, each.params)
        if each.answered is not None:
            each.answered(cursor)
    return send(last.sql, last.params)


#: How statements that wait are sent: a test kit interleaves them with those of other sessions.
send_all = in_one_message


def sends_several(connection: Any, by: RowTransactions) -> bool:
    """Return whether several statements may be sent as one message."""
    database, driver = connection.Database, connection.connection
    return (
        connection.vendor == "postgresql"
        and hasattr(database, "ClientCursor")
        and driver is not None
        and issubclass(driver.cursor_factory, database.ClientCursor)
        and not is_observed(connection, by)
    )


def is_observed(connection: Any, by: RowTransactions) -> bool:
    """Return whether code of others looks at each statement that this connection executes."""
    return any(getattr(each, "__self__", None) is not by for each in connection.execute_wrappers)
