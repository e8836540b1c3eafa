"""What the errors of a database mean: three questions, and whether the session is still there."""

from __future__ import annotations

import select
from typing import Any

from django.db import DatabaseError, Error, InterfaceError, OperationalError, connections

from dcl_processor.pending import steady as time

#: no_active_sql_transaction, query_canceled: PostgreSQL.
NO_TRANSACTION, CANCELLED = "25P01", "57014"

_CONTENTION = frozenset(
    {
        # serialization_failure, deadlock_detected, lock_not_available: PostgreSQL.
        *("40001", "40P01", "55P03"),
        # Deadlock, lock wait timeout, record has changed since last read, NOWAIT: MariaDB, MySQL.
        *(1213, 1205, 1020, 3572),
        # Busy, locked.
        *("SQLite 5", "SQLite 6"),
    }
)

#: Of a statement, by MariaDB and by MySQL; KILL QUERY; interrupt.
_TIMED_OUT = frozenset({CANCELLED, 1969, 3024, 1317, "SQLite 9"})

#: Classes of PostgreSQL: connection, rollback, resources, operator intervention, system error.
_OF_THE_MOMENT = frozenset({"08", "40", "53", "57", "58"})

_PASSING = frozenset(
    {
        *_CONTENTION,
        *_TIMED_OUT,
        # Too many connections, shutdown, connection killed: MariaDB.
        *(1040, 1053, 1927),
        # Memory, disk, table of locks are full.
        *(1021, 1037, 1038, 1041, 1114, 1135, 1206, "SQLite 7", "SQLite 13"),
    }
)

#: Classes of PostgreSQL: data, syntax or access rule. MariaDB: data too long, out of range, wrong
#: value; unknown column; no right.
_REFUSED = ("22", "42")
_REFUSALS = frozenset({1406, 1264, 1265, 1292, 1366, 1054, 1142, 1143})

#: Seconds for which a run waits for a server that is away, before it calls the next handler.
AWAY = 5.0


def is_database_error(error: BaseException) -> bool:
    """Return whether the error came from the database; ``InterfaceError`` is a separate class."""
    return isinstance(error, DatabaseError | InterfaceError)


def code_of(error: BaseException) -> str | int | None:
    """Return PostgreSQL's SQLSTATE, MariaDB's number, or SQLite's code, as in "SQLite 5"."""
    cause: Any = error.__cause__
    if (state := getattr(cause, "sqlstate", None)) is not None:
        return str(state)
    if (code := getattr(cause, "sqlite_errorcode", None)) is not None:
        return f"SQLite {code & 0xFF}"  # extended codes keep the primary one in their low byte
    return next((each for each in getattr(cause, "args", ())[:1] if isinstance(each, int)), None)


def is_contention(error: BaseException) -> bool:
    """Return whether a claim's error is transient: another session has the lock."""
    return code_of(error) in _CONTENTION


def is_statement_timeout(error: BaseException) -> bool:
    """Return whether the database ended a statement that took too long."""
    return code_of(error) in _TIMED_OUT


def is_passing(error: BaseException) -> bool:
    """Return whether the same write may succeed later: a lock, a time limit, a lost session."""
    code = code_of(error)
    if code is None:
        return isinstance(error, OperationalError | InterfaceError)
    if isinstance(code, int):  # from 2000 they are the client's own, of a session
        return 2000 <= code < 3000 or code in _PASSING
    return code[:2] in _OF_THE_MOMENT or code in _PASSING


def is_refusal(error: BaseException) -> bool:
    """Return whether the database refuses what was to be written: the value, or the right."""
    code = code_of(error)
    return code in _REFUSALS or (isinstance(code, str) and code.startswith(_REFUSED))


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
