"""The transaction that a row is claimed, handled and flipped in.

The second check is worth something only if its statement has a snapshot of its own: READ
COMMITTED. What a connection uses can be set in the settings, for a role, for a database or for
the server, so the server is asked, once per connection.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from dcl_processor.exceptions import InsideTransaction, Unsupported

_SET = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"

# Keyed by the driver's connection, so that a reconnect asks again.
_levels: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def refuse_outer_transaction(using: str, label: str) -> None:
    """Raise unless every row can be committed by itself; asks the database nothing."""
    connection = connections[using]
    _close_if_broken(connection)
    if connection.in_atomic_block:
        if not any(map(from_test_case, connection.atomic_blocks[-1:])):
            raise InsideTransaction(
                f"{label}: expected to run outside any transaction, so that each row is "
                f"committed by itself, got a run inside transaction.atomic() on {using!r}; call "
                "it after the block, or from transaction.on_commit()."
            )
    elif not connection.get_autocommit():
        raise Unsupported(
            f"{label}: expected a connection in autocommit mode, got AUTOCOMMIT=False on "
            f"{using!r}, where Django never commits; set it to True, or give the processor an "
            "alias of its own with using=."
        )


def _close_if_broken(connection: BaseDatabaseWrapper) -> None:
    """Let a process that lives long reconnect after the server was restarted between two runs.

    Django does so between requests. Asks the server only after an error.
    """
    broken = connection.errors_occurred and not connection.in_atomic_block
    if broken and connection.connection is not None and not connection.is_usable():
        connection.close()


def refuse_test_case(using: str, label: str) -> None:
    """Raise inside Django's ``TestCase``, whose rows no other connection sees."""
    if connections[using].in_atomic_block:
        raise Unsupported(
            f"{label}: expected TransactionTestCase for concurrency above 1, got a run inside "
            "TestCase, whose rows are never committed; its handlers would see nothing of them."
        )


@contextmanager
def row_transaction(using: str) -> Iterator[None]:
    """Open the transaction of one row, at READ COMMITTED whatever the connection's default.

    Inside Django's ``TestCase`` it is a savepoint, and the isolation level stays as it is.
    """
    connection = connections[using]
    fresh = not connection.in_atomic_block
    # MariaDB and MySQL take the level of the next transaction before it starts, PostgreSQL as
    # its first statement.
    if fresh and connection.vendor == "mysql":
        _read_committed(connection)
    with transaction.atomic(using=using, durable=True):
        if fresh and connection.vendor == "postgresql":
            _read_committed(connection)
        yield


def is_connected(using: str) -> bool:
    """Tell whether a statement can be sent, on a new connection if the session was ended.

    A server that ends a session tells the client, so there is something to read although nothing
    was asked. Asks the server only then, and after an error.
    """
    connection: Any = connections[using]
    if connection.connection is None or connection.in_atomic_block:
        return True
    if not connection.errors_occurred and not _has_news(connection.connection):
        return True
    if connection.is_usable():
        connection.errors_occurred = False
        return True
    return reconnected(using)


def _has_news(driver: Any) -> bool:
    """Tell whether the server sent something that nobody asked for, or the connection is closed."""
    if not hasattr(driver, "fileno"):
        return False  # SQLite has no session to lose
    try:
        poll = select.poll()
        poll.register(driver.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # noqa: BLE001  # each driver has an error of its own for a closed connection
        return True


def reconnected(using: str, *, since: Any = None) -> bool:
    """Replace the connection if it was lost; tell whether it was, and a new one is there.

    ``since``: the driver's connection as it was before the error.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        return False
    # Not close_if_unusable_or_obsolete(): with CONN_MAX_AGE=0 any connection is obsolete, and any
    # error at all would pass for a lost one.
    if connection.connection is not None and connection.is_usable():
        # Django itself connects anew where the ROLLBACK of a transaction finds the session gone.
        return since is not None and connection.connection is not since
    connection.close()
    try:
        connection.ensure_connection()
    except Error:
        return False
    return True


def _read_committed(connection: BaseDatabaseWrapper) -> None:
    connection.ensure_connection()
    if connection.connection not in _levels:
        _levels[connection.connection] = _ask(connection) == "READ COMMITTED"
    if not _levels[connection.connection]:
        with connection.cursor() as cursor:
            cursor.execute(_SET)


def _ask(connection: BaseDatabaseWrapper) -> str:
    # SHOW takes no snapshot, so PostgreSQL still lets the level be set after it. The variable is
    # tx_isolation on older servers of the MySQL family, transaction_isolation on newer ones.
    question = (
        "SHOW transaction_isolation"
        if connection.vendor == "postgresql"
        else "SHOW VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')"
    )
    with connection.cursor() as cursor:
        cursor.execute(question)
        level: str = cursor.fetchone()[-1]
    return level.upper().replace("-", " ")


def from_test_case(block: Any) -> bool:
    """Tell whether a block of ``atomic()`` is one that Django's ``TestCase`` opened."""
    # The same mark by which atomic(durable=True) lets Django's TestCase pass.
    return getattr(block, "_from_testcase", False)
