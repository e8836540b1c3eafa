"""The transaction that a row is claimed, handled and flipped in, and tables that have one.

The second check works only if its statement has a snapshot of its own, as at READ COMMITTED. The
level of a connection can be set in the settings, for a role, for a database, for the server, and
by a handler. PostgreSQL accepts the level with each BEGIN. MariaDB and MySQL need a separate
statement for it, so their level is read once per connection.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model

from dcl_processor.candidates.question import Question
from dcl_processor.database.connection import is_connected
from dcl_processor.database.driver import asked_in_transaction, in_transaction, roll_back
from dcl_processor.exceptions import InsideTransaction, Unsupported
from dcl_processor.interrupts import interrupt_behind

_READ_COMMITTED = 2  # psycopg's IsolationLevel
_SET = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"

# Keyed by the driver's connection, so that the level is read again after a reconnect.
_levels: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

#: The blocks of ``atomic()`` that began at READ COMMITTED, which their session does not show.
_begun: WeakSet[Any] = WeakSet()


def refuse_outer_transaction(using: str, label: str) -> None:
    """Raise unless each row can be committed separately; a session that was ended is replaced."""
    connection = connections[using]
    is_connected(using)
    if connection.in_atomic_block:
        if not any(map(from_test_case, connection.atomic_blocks[-1:])):
            raise InsideTransaction(
                f"{label}: expected a run outside any transaction, because each row is committed "
                f"separately, got one inside transaction.atomic() on {using!r}; start it after the "
                "block, or in transaction.on_commit()."
            )
    elif connection.connection is not None and in_transaction(connection):
        raise _begun_by_caller(using, label)
    elif not connection.get_autocommit():
        raise Unsupported(
            f"{label}: expected a connection in autocommit mode, got AUTOCOMMIT=False on "
            f"{using!r}, with which Django never commits; set it to True, or give the processor an "
            "alias of its own with using=."
        )


def refuse_unknown_transaction(using: str, label: str) -> None:
    """Ask where the driver does not know; raise if the caller has a transaction open."""
    connection = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return
    if in_transaction(connection) is None and asked_in_transaction(connection):
        raise _begun_by_caller(using, label)


def _begun_by_caller(using: str, label: str) -> InsideTransaction:
    return InsideTransaction(
        f"{label}: expected a run outside any transaction, because each row is committed "
        f"separately, got one that was begun on {using!r} without Django, by a BEGIN of its "
        "own; end it before the run, or use transaction.atomic() and start the run after it."
    )


def refuse_other_transactions(using: str, label: str) -> None:
    """Raise if a transaction is open on another alias, which an interrupted handler would lose."""
    for connection in connections.all(initialized_only=True):
        is_own = connection.alias == using
        is_of_test = any(map(from_test_case, connection.atomic_blocks[-1:]))
        is_open = connection.in_atomic_block or not connection.autocommit
        if is_open and not (is_own or is_of_test) and connection.connection is not None:
            raise InsideTransaction(
                f"{label}: expected a run with handler_timeout outside any transaction, because "
                "the sessions of an interrupted handler are closed, got one inside an open "
                f"transaction on {connection.alias!r}; start it after the block."
            )


def refuse_old_snapshot(using: str, label: str, *, own_table: bool) -> None:
    """Raise inside a transaction whose reads do not see what others have committed since it began.

    On MariaDB and MySQL a lock does not fail for a row that was changed after the snapshot, and the
    check under the lock would read the row as it was. On PostgreSQL it fails, but the other tables
    that a question reads are read as they were; ``own_table``: it reads none.
    """
    connection: Any = connections[using]
    blocks = connection.atomic_blocks
    is_ours = bool(blocks) and (from_test_case(blocks[0]) or blocks[0] in _begun)
    sees_old = connection.vendor == "mysql" or (connection.vendor == "postgresql" and not own_table)
    if not sees_old or not connection.in_atomic_block or is_ours:
        return
    # Race: stale second check. A worker may have settled the row since the snapshot.
    level = _ask(connection)
    if level != "READ COMMITTED":
        raise InsideTransaction(
            f"{label}: expected a transaction at READ COMMITTED around requeue(), mark_done() and "
            "discard(), in which they see what workers have committed, got one inside "
            f"transaction.atomic() at {level} on {using!r}; call them after the block, or set "
            "isolation_level to 'read committed' in OPTIONS."
        )


class ReadCommitted:
    """A transaction at READ COMMITTED, whatever the connection's default.

    Inside Django's ``TestCase`` it is a savepoint, and the isolation level stays as it is.
    """

    __slots__ = ("_atomic", "_connection", "_driver", "_is_outermost", "_level")

    def __init__(self, using: str) -> None:
        self._connection: Any = connections[using]
        self._atomic = transaction.atomic(using=using, durable=True)
        self._is_outermost = not self._connection.in_atomic_block
        #: The driver's connection, if it gets the level with BEGIN, and the level that it had.
        self._driver: Any = None
        self._level: Any = None

    def __enter__(self) -> None:
        connection = self._connection
        if not self._is_outermost:
            self._atomic.__enter__()
            return
        connection.ensure_connection()
        driver = connection.connection
        try:
            if hasattr(driver, "pgconn"):
                # Race: stale second check. At a higher level the statement that checks again would
                # read the lock statement's snapshot. With BEGIN the level costs no round trip.
                self._driver, self._level = driver, driver.isolation_level
                driver.isolation_level = _READ_COMMITTED
            elif connection.vendor == "mysql" and not _is_read_committed(connection):
                _set_read_committed(connection)
                _begun.add(self._atomic)
            self._atomic.__enter__()
            if self._driver is None and connection.vendor == "postgresql":
                # psycopg2 would send the level in a statement whenever autocommit is switched.
                _set_read_committed(connection)
        except BaseException:
            self._end(is_whole=False)
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:  # noqa: PYI036
        is_whole, handled = False, None
        try:
            handled = sys.exception() if error is None else error.__context__
            self._atomic.__exit__(kind, error, trace)
            is_whole = True
        except Exception as raised:
            # Django's end of a block fails if it was interrupted, and hides the interrupt.
            if interrupt := interrupt_behind(raised, handled):
                raise interrupt from None
            raise
        finally:
            self._end(is_whole=is_whole)

    def _end(self, *, is_whole: bool) -> None:
        """End what an interrupt has left of the transaction, and set its level back."""
        connection, driver = self._connection, self._driver
        if not self._is_outermost or connection.connection is None:
            return
        # Django takes the innermost block for its own, if the interrupt came in another one.
        if not is_whole or connection.in_atomic_block:
            roll_back(connection)
        if driver is not None and not driver.closed:
            driver.isolation_level = self._level


def _is_read_committed(connection: BaseDatabaseWrapper) -> bool:
    """Return whether the session's transactions begin at READ COMMITTED, on MariaDB and MySQL."""
    # Known before the transaction starts. At any level InnoDB takes the snapshot at the first plain
    # read, which is the question itself, so a default that a handler changes is harmless.
    driver: Any = connection.connection
    if driver not in _levels:
        _levels[driver] = _ask(connection) == "READ COMMITTED"
    return _levels[driver]


def _set_read_committed(connection: BaseDatabaseWrapper) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_SET)


def _ask(connection: BaseDatabaseWrapper) -> str:
    sql = "SHOW transaction_isolation"
    if connection.vendor == "mysql":
        # tx_isolation on older servers, transaction_isolation on newer ones.
        sql = "SHOW VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')"
    with connection.cursor() as cursor:
        cursor.execute(sql)
        level: str = cursor.fetchone()[-1]
    return level.upper().replace("-", " ")


def from_test_case(block: Any) -> bool:
    """Return whether Django's ``TestCase`` opened this block of ``atomic()``."""
    # The same attribute by which atomic(durable=True) accepts Django's TestCase.
    return getattr(block, "_from_testcase", False)


# --- tables with row locks and rollback, and updates that count the rows that they match
#
# On MariaDB and MySQL, both depend on the project. MyISAM, MEMORY and Aria accept every statement
# of a transaction, lock no row, and keep writes that are rolled back. A server may have tables of
# both kinds, so each table is checked once per connection.


# One table at a time, so that both names are constants and the server opens no other table.
_WITHOUT_TRANSACTIONS = """
    SELECT ENGINE FROM information_schema.TABLES
    WHERE TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s
    AND ENGINE NOT IN (SELECT ENGINE FROM information_schema.ENGINES WHERE TRANSACTIONS = 'YES')
"""

# Keyed by the driver's connection, so that the tables are checked again after a reconnect.
_trusted: WeakKeyDictionary[Any, set[type[Model]]] = WeakKeyDictionary()


def refuse_without_transactions(question: Question[Any]) -> None:
    """Raise ``Unsupported`` unless the tables have transactions, and updates count matches."""
    connection = connections[question.using]
    if connection.vendor != "mysql":
        return
    connection.ensure_connection()
    if connection.connection not in _trusted:
        _refuse_changed_rows(connection)
        _refuse_ignored_locks(connection)
    trusted = _trusted.setdefault(connection.connection, set())
    if question.model in trusted:
        return
    for name in _tables(question.model):
        # The name of a table in another database is `database`.`table`.
        schema, _, table = name.strip("`").rpartition("`.`")
        with connection.cursor() as cursor:
            cursor.execute(_WITHOUT_TRANSACTIONS, [schema or None, table])
            found = cursor.fetchone()
        if found is not None:
            raise Unsupported(
                f"{question.model._meta.label}: expected tables with transactions on "
                f"{question.using!r}, got {table} with the engine {found[0]}, which locks no row "
                f"and rolls nothing back; run ALTER TABLE {table} ENGINE=InnoDB."
            )
    trusted.add(question.model)


def _refuse_changed_rows(connection: Any) -> None:
    flags = connection.get_connection_params().get("client_flag", 2)
    if not flags & 2:  # FOUND_ROWS, which Django sets
        raise Unsupported(
            f"expected the connection {connection.alias!r} to count the rows that an UPDATE "
            f"matches, got OPTIONS with client_flag={flags} without FOUND_ROWS, with which a row "
            "that has these values already counts as not written; remove client_flag, or add "
            "MySQLdb.constants.CLIENT.FOUND_ROWS to it."
        )


def _refuse_ignored_locks(connection: Any) -> None:
    if "tidb" in connection.mysql_server_info.lower():
        raise Unsupported(
            f"expected a database on {connection.alias!r} that keeps SKIP LOCKED, got "
            f"{connection.mysql_server_info}, which accepts these words and ignores them, so that "
            "two workers would handle one row; use PostgreSQL, MariaDB or MySQL."
        )


def _tables(model: type[Model]) -> Iterator[str]:
    for each in (model, *model._meta.all_parents):
        if not each._meta.proxy:
            yield each._meta.db_table
