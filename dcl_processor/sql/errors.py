"""What the errors of a database mean: three questions, and whether the session is still there."""

from __future__ import annotations

import select
from typing import Any

from django.db import DatabaseError, Error, InterfaceError, OperationalError, connections

from dcl_processor.pending import steady as time

# 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available: PostgreSQL.
_STATES = frozenset({"40001", "40P01", "55P03"})

# 1213 deadlock, 1205 lock wait timeout, 1020 record has changed since last read, 3572 NOWAIT.
_NUMBERS = frozenset({1213, 1205, 1020, 3572})

_SQLITE_BUSY, _SQLITE_LOCKED, _SQLITE_INTERRUPT = 5, 6, 9

# Of a statement, by MariaDB and by MySQL, and KILL QUERY.
_TIMED_OUT = frozenset({1969, 3024, 1317})

# 08 connection, 40 rollback, 53 resources, 57 operator intervention, 58 system error: PostgreSQL.
_OF_THE_MOMENT = frozenset({"08", "40", "53", "57", "58"})

# Too many connections, shutdown, connection killed: MariaDB. Memory, disk, table of locks are full.
_OF_THE_SERVER = frozenset({1040, 1053, 1927}) | _TIMED_OUT
_NO_ROOM, _SQLITE_NO_ROOM = frozenset({1021, 1037, 1038, 1041, 1114, 1135, 1206}), (7, 13)

#: no_active_sql_transaction, query_canceled.
NO_TRANSACTION, CANCELLED = "25P01", "57014"

#: Seconds for which a run waits for a server that is away, before it calls the next handler.
AWAY = 5.0

# Of MariaDB: data too long, out of range, wrong value; unknown column; no right.
_REFUSALS = frozenset({1406, 1264, 1265, 1292, 1366, 1054, 1142, 1143})


def is_database_error(error: BaseException) -> bool:
    """Return whether the error came from the database; ``InterfaceError`` is a separate class."""
    return isinstance(error, DatabaseError | InterfaceError)


def is_contention(error: BaseException) -> bool:
    """Return whether a claim's error is transient: another session has the lock."""
    # Extended result codes of SQLite keep the primary one in their low byte.
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    is_busy = code is not None and code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)
    return state_of(error) in _STATES or error_number(error) in _NUMBERS or is_busy


def is_statement_timeout(error: BaseException) -> bool:
    """Return whether the database ended a statement that took too long."""
    if state_of(error) == CANCELLED or error_number(error) in _TIMED_OUT:
        return True
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    return code is not None and code & 0xFF == _SQLITE_INTERRUPT


def is_passing(error: BaseException) -> bool:
    """Return whether the same write may succeed later: a lock, a time limit, a lost session."""
    if is_contention(error):
        return True
    state, number = state_of(error), error_number(error)
    if state is not None:
        return state[:2] in _OF_THE_MOMENT
    if number is not None:  # from 2000 they are the client's own, of a session
        return 2000 <= number < 3000 or number in _OF_THE_SERVER | _NO_ROOM
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in (_SQLITE_INTERRUPT, *_SQLITE_NO_ROOM)
    return isinstance(error, OperationalError | InterfaceError)


def is_refusal(error: BaseException) -> bool:
    """Return whether the database refuses what was to be written: the value, or the right."""
    state = state_of(error) or ""
    return state.startswith(("22", "42")) or error_number(error) in _REFUSALS


def state_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error of PostgreSQL."""
    state: str | None = getattr(error.__cause__, "sqlstate", None)
    return state


def error_number(error: BaseException) -> int | None:
    """Return the number of an error of MariaDB or MySQL."""
    cause = error.__cause__
    number = cause.args[0] if cause is not None and cause.args else None
    return number if isinstance(number, int) else None


def is_connected(using: str) -> bool:
    """Return whether a statement can be sent, on a new connection if the session was ended.

    A server that ends a session notifies the client, so there is something to read although nothing
    was sent. Sends a query only in that case, and after an error.
    """
    connection = connections[using]
    driver = connection.connection
    if connection.in_atomic_block:
        return True
    if driver is None:
        return reconnected(using)
    if not (connection.errors_occurred or has_news(driver)):
        return True
    if connection.is_usable():
        connection.errors_occurred = False
        return True
    return reconnected(using)


def is_back(using: str, patience: float = AWAY) -> bool:
    """Wait for a server that is away; return whether a statement can be sent now."""
    end = time.monotonic() + patience
    while not is_connected(using):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def has_news(driver: Any) -> bool:
    """Return whether there is something to read although no statement was sent, or it is closed."""
    if not hasattr(driver, "fileno"):
        return False  # SQLite has no session to lose
    try:
        poll = select.poll()
        poll.register(driver.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    except Exception:  # noqa: BLE001  # each driver has an error of its own for a closed connection
        return True


def reconnected(using: str) -> bool:
    """Replace the connection if it was lost; return whether there is a new one."""
    connection = connections[using]
    if connection.in_atomic_block:
        return False
    if connection.connection is not None and connection.is_usable():
        return False
    connection.close()
    try:
        connection.ensure_connection()
    except Error:
        return False
    return True
