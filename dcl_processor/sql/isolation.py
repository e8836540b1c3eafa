"""The transaction of a claim: at READ COMMITTED, whatever the connection's default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import Error, connections, transaction

from dcl_processor.report.exceptions import InsideTransaction, Unsupported
from dcl_processor.sql.errors import code_of

_READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"


#: MariaDB's driver does not know of a transaction that the caller has begun; its server does.
_IN_TRANSACTION = 1568

#: libpq's PQTRANS_IDLE and PQTRANS_UNKNOWN.
_IDLE, _LOST = 0, 4


def begin(using: str) -> Any:
    """Open a transaction at READ COMMITTED; return its block of ``atomic()``.

    Inside Django's ``TestCase`` it is a savepoint, and the isolation level stays as it is.
    """
    connection: Any = connections[using]
    block = transaction.Atomic(using, savepoint=True, durable=True)
    if connection.in_atomic_block:
        block.__enter__()
        return block
    connection.ensure_connection()
    # Race: stale second check. At a higher level the statement that checks again would read the
    # lock statement's snapshot.
    if connection.vendor == "mysql":
        try:
            _execute(connection, _READ_COMMITTED)
        except Error as error:
            if code_of(error) != _IN_TRANSACTION:
                raise
            raise InsideTransaction(_begun(using)) from error
    block.__enter__()
    try:
        if connection.vendor == "postgresql":
            _execute(connection, _READ_COMMITTED)
    except BaseException as error:
        block.__exit__(type(error), error, error.__traceback__)
        raise
    return block


@contextmanager
def read_committed(using: str) -> Iterator[None]:
    """Open a transaction at READ COMMITTED for the block."""
    block = begin(using)
    try:
        yield
    except BaseException as error:
        block.__exit__(type(error), error, error.__traceback__)
        raise
    block.__exit__(None, None, None)


def _execute(connection: Any, sql: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql)


def in_test_case(connection: Any) -> bool:
    """Return whether Django's ``TestCase`` keeps a transaction open on the connection."""
    return any(getattr(each, "_from_testcase", False) for each in connection.atomic_blocks[:1])


def refuse_outer_transaction(using: str, label: str, what: str = "a run") -> None:
    """Raise unless each row can be committed separately; ``what`` would do it."""
    connection = connections[using]
    if connection.in_atomic_block:
        if not any(
            getattr(each, "_from_testcase", False) for each in connection.atomic_blocks[-1:]
        ):
            raise InsideTransaction(
                f"{label}: expected {what} outside any transaction, because each row is committed "
                f"separately, got one inside transaction.atomic() on {using!r}; start it after the "
                "block, or in transaction.on_commit()."
            )
    elif connection.connection is not None and in_transaction(connection):
        raise InsideTransaction(f"{label}: {_begun(using)}")
    elif not connection.get_autocommit():
        raise Unsupported(
            f"{label}: expected a connection in autocommit mode, got AUTOCOMMIT=False on "
            f"{using!r}, with which Django never commits; set it to True, or give the processor an "
            "alias of its own with using=."
        )


def _begun(using: str) -> str:
    return (
        "expected a run outside any transaction, because each row is committed separately, got one "
        f"that was begun on {using!r} without Django, by a BEGIN of its own; end it before the "
        "run, or use transaction.atomic() and start the run after it."
    )


def in_transaction(connection: Any) -> bool:
    """Return whether a transaction is open on the driver's connection, as far as it knows."""
    driver = connection.connection
    if driver is None:
        return False
    if connection.vendor == "postgresql":
        # A session that is lost has taken its transaction with it.
        return _status(driver) not in (_IDLE, _LOST)
    if connection.vendor == "sqlite":
        return bool(driver.in_transaction)
    return bool(connection.in_atomic_block)  # MariaDB's driver does not know


def is_lost(connection: Any) -> bool:
    """Return whether the driver knows that the session has ended, which only PostgreSQL's does."""
    driver = connection.connection
    return connection.vendor == "postgresql" and driver is not None and _status(driver) == _LOST


def _status(driver: Any) -> int:
    return int(driver.info.transaction_status)


def says_open(connection: Any) -> bool:
    """Ask MariaDB, whose driver does not know, whether a transaction is open."""
    if connection.vendor != "mysql" or connection.connection is None:
        return False
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@in_transaction")
            return bool(cursor.fetchone()[0])
    except Error:
        return False  # the session is lost, and its transaction with it; or MySQL cannot tell


def roll_back(connection: Any) -> None:
    """End the transaction that is open, whatever Django knows of it; its callbacks never run."""
    connection.in_atomic_block = connection.needs_rollback = False
    connection.savepoint_ids, connection.atomic_blocks = [], []
    if connection.closed_in_transaction:
        connection.connection, connection.closed_in_transaction = None, False
    connection.run_on_commit = []
    if connection.connection is None:
        return
    try:
        connection.connection.rollback()
        connection.set_autocommit(True)
    except (Error, connection.Database.Error):
        connection.close()
