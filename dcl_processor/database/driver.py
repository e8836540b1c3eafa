"""The driver's side of a session: what it knows without a query, and what it sends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
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


class Sending:
    """Calls a function before the driver sends anything, for Django or for other code.

    It is called once, and then the driver is as before. ``is_seen``: whether this driver has a
    method through which it sends everything.
    """

    __slots__ = ("_before", "_call", "_driver", "_name", "is_seen")

    def __init__(self, connection: Any, call: Callable[[], None]) -> None:
        self._driver = connection.connection
        self._call = call
        kind: Any = type(self._driver)
        self._name = _place(connection.vendor, kind)
        self.is_seen = self._name is not None
        self._before = vars(self._driver).get(self._name) if self._name else None

    def start(self) -> None:
        """Call the function before the next send."""
        if self._name is not None:
            # On the driver's connection, because a cursor may be older than this object.
            setattr(self._driver, self._name, self._first)

    def stop(self) -> None:
        """Restore the driver."""
        if self._name is not None:
            vars(self._driver).pop(self._name, None)
            if self._before is not None:
                setattr(self._driver, self._name, self._before)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        self.stop()
        self._call()
        assert self._name is not None
        return getattr(self._driver, self._name)(*args, **kwargs)


class Sent:
    """Counts what a connection of psycopg 3 sends, for Django or for other code."""

    __slots__ = ("_driver", "_send", "before", "count")

    def __init__(self) -> None:
        self.count = 0
        #: What was in the place of the driver's method, if anything was.
        self.before: Any = None
        self._driver: Any = None

    def follow(self, driver: Any) -> None:
        """Count from now on what this connection sends, instead of what has counted it so far."""
        self.stop()
        before = vars(driver).get("wait")
        self.before = before.before if isinstance(before, Sent) else before
        self._send = self.before or partial(type(driver).wait, driver)
        self._driver, driver.wait = driver, self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Send, in the place of the driver's method."""
        self.count += 1
        return self._send(*args, **kwargs)

    def stop(self) -> None:
        """Restore the driver."""
        driver, self._driver = self._driver, None
        if driver is not None and vars(driver).get("wait") is self:
            del driver.wait
            if self.before is not None:
                driver.wait = self.before


@cache
def _place(vendor: str, driver: type) -> str | None:
    """Return the method through which a driver sends everything, if it is written in Python."""
    name = {"postgresql": "wait", "mysql": "query"}.get(vendor)
    return name if name and driver.__dictoffset__ and hasattr(driver, name) else None


def send(connection: Any, sql: str) -> None:
    """Send a statement without parameters and without an answer, past Django's cursors.

    Takes no lock of the driver, because its holder may be about to send what this must precede.
    """
    driver = connection.connection
    with connection.wrap_database_errors:
        if connection.vendor == "sqlite":
            driver.execute(sql)
        elif connection.vendor == "mysql":
            driver.query(sql.encode())
        else:
            driver.pgconn.exec_(sql.encode())


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
