"""The driver's side of a session: what it knows without a query."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import Error

from .contention import savepoint_is_gone

_IDLE, _ACTIVE = 0, 1  # libpq's PQTRANS_IDLE and PQTRANS_ACTIVE

_SAVEPOINT = "dcl_left"

#: Seconds that a server has to answer a request to cancel a statement.
CANCEL_WITHIN = 5.0


def in_transaction(connection: Any) -> bool | None:
    """Return whether a transaction is open, however it began; ``None`` if the driver cannot."""
    driver = connection.connection
    if driver is None:
        return False
    if connection.vendor == "postgresql":
        # psycopg2 has the status only in its info, which psycopg 3 would create for each read.
        status = getattr(driver, "pgconn", None) or driver.info
        return bool(status.transaction_status != _IDLE)
    # MariaDB's driver does not know, because its server does not report the status to it.
    return bool(driver.in_transaction) if connection.vendor == "sqlite" else None


def asked_in_transaction(connection: Any) -> bool:
    """Ask the server whether a transaction is open; for MariaDB and MySQL."""
    driver, operations = connection.connection, connection.ops
    if connection.mysql_is_mariadb:
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@in_transaction OR NOT @@autocommit")
            return bool(cursor.fetchone()[0])
    try:
        # Outside a transaction a savepoint ends with its statement.
        with connection.cursor() as cursor:
            cursor.execute(operations.savepoint_create_sql(_SAVEPOINT))
            cursor.execute(operations.savepoint_commit_sql(_SAVEPOINT))
    except Error as error:
        connection.errors_occurred = connection.errors_occurred and not savepoint_is_gone(error)
        return not driver.get_autocommit()
    return True


def forget_transaction(connection: Any) -> None:
    """Let Django know of no transaction, as in ``connect()``; its blocks will never be left."""
    connection.in_atomic_block = connection.needs_rollback = False
    connection.savepoint_ids, connection.atomic_blocks = [], []
    if connection.closed_in_transaction:
        connection.connection, connection.closed_in_transaction = None, False


def roll_back(connection: Any) -> None:
    """End the transaction that is open, whatever Django knows of it; its callbacks never run."""
    forget_transaction(connection)
    connection.run_on_commit = []
    if connection.connection is None:
        return
    try:
        connection.connection.rollback()
        connection.set_autocommit(True)
        if in_transaction(connection):
            # psycopg2 rolls back only a transaction that it began itself.
            connection.close()
    except (Error, connection.Database.Error):
        connection.close()


def is_busy(connection: Any) -> bool:
    """Return whether a statement was sent whose answer was not read, as far as the driver tells."""
    driver = connection.connection
    if driver is None or connection.vendor != "postgresql":
        return False
    status = getattr(driver, "pgconn", None) or driver.info
    return bool(status.transaction_status == _ACTIVE)


def cancel(connection: Any) -> None:
    """Ask the server to end the statement at hand, on a connection of its own; PostgreSQL only.

    Otherwise the statement would go on without a client, and keep its locks.
    """
    driver = connection.connection
    with suppress(Exception):  # the session is closed in any case
        if hasattr(driver, "cancel_safe"):
            driver.cancel_safe(timeout=CANCEL_WITHIN)
        else:
            driver.cancel()
