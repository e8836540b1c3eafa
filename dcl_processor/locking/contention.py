"""Database errors by SQLSTATE and errno: what they mean is decided here and nowhere else."""

from __future__ import annotations

from django.db import DatabaseError, InterfaceError

# 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available (NOWAIT,
# lock_timeout): PostgreSQL. 57014 (statement_timeout, cancel) is a person's wish, not contention.
_SQLSTATES = frozenset({"40001", "40P01", "55P03"})

# 1213 deadlock, 1205 lock wait timeout (NOWAIT too), 1020 record has changed since last read,
# 3572 NOWAIT refused (MySQL): the errno is the first argument of the driver's error.
_ERRNOS = frozenset({1213, 1205, 1020, 3572})

# InnoDB answers a deadlock by rolling back the whole transaction, locks and all, and the next
# statement silently opens a new one.
_DEADLOCK = 1213

_SQLITE_BUSY, _SQLITE_LOCKED = 5, 6


def is_contention(error: Exception) -> bool:
    """Tell whether a claim's error means "somebody else has it": ask again later."""
    cause = error.__cause__
    if _sqlstate(cause) in _SQLSTATES or _errno(cause) in _ERRNOS:
        return True
    code = getattr(cause, "sqlite_errorcode", None)
    # Extended result codes keep the primary one in their low byte.
    return code is not None and code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)


def ends_transaction(error: Exception) -> bool:
    """Tell whether the server rolled back the whole transaction without being asked."""
    return _errno(error.__cause__) == _DEADLOCK


def is_database_error(error: BaseException) -> bool:
    """Tell whether the error came from the database: ``InterfaceError`` is beside the family."""
    return isinstance(error, DatabaseError | InterfaceError)


def _sqlstate(cause: BaseException | None) -> str | None:
    # psycopg 3 says sqlstate, psycopg2 says pgcode.
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def _errno(cause: BaseException | None) -> int | None:
    code = cause.args[0] if cause is not None and cause.args else None
    return code if isinstance(code, int) else None
