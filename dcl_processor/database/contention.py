"""Database errors by SQLSTATE and errno; only this module decides what they mean."""

from __future__ import annotations

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
)

from dcl_processor.exceptions import ProcessorError, ReadOnlyDatabase, SessionLost, Unsupported

# 40001 serialization_failure, 40P01 deadlock_detected, 55P03 lock_not_available (NOWAIT,
# lock_timeout): PostgreSQL. 57014 (statement_timeout, cancel) is a person's wish, not contention.
_SQLSTATES = frozenset({"40001", "40P01", "55P03"})

# 1213 deadlock, 1205 lock wait timeout (NOWAIT too), 1020 record has changed since last read,
# 3572 NOWAIT refused (MySQL). The errno is the first argument of the driver's error.
_ERRNOS = frozenset({1213, 1205, 1020, 3572})

# On a deadlock InnoDB rolls back the whole transaction and releases its locks, and the next
# statement silently opens a new transaction.
_DEADLOCK = 1213

# 3B001 no such savepoint, 25P01 no transaction; 1305 no such savepoint. SQLite has one code for
# all errors of a statement, such as a missing table, and a savepoint statement can have no other
# error.
_NO_SAVEPOINT_STATES, _NO_SAVEPOINT, _SQLITE_ERROR = frozenset({"3B001", "25P01"}), 1305, 1

# 25006 read_only_sql_transaction; 1290 and 1836 a read-only server, 1792 a read-only transaction;
# SQLITE_READONLY.
_READ_ONLY_STATES, _READ_ONLY = frozenset({"25006"}), frozenset({1290, 1836, 1792})

# The binary log cannot record the writes of a READ COMMITTED transaction.
_NEEDS_ROW_LOG = 1665

_SQLITE_BUSY, _SQLITE_LOCKED, _SQLITE_READONLY, _SQLITE_INTERRUPT = 5, 6, 8, 9

# 57014 query_canceled: by statement_timeout, or by a person. 1969 max_statement_time (MariaDB),
# 3024 max_execution_time (MySQL), 1317 KILL QUERY.
_CANCELED, _TIMED_OUT = "57014", frozenset({1969, 3024, 1317})

# 53 insufficient resources. 1021 disk full, 1114 table full, 1206 table of locks full, 1037, 1041
# no memory, 1038 none to sort, 1135 no thread. SQLITE_NOMEM, SQLITE_FULL.
_NO_ROOM, _SQLITE_NO_ROOM = frozenset({1021, 1037, 1038, 1041, 1114, 1135, 1206}), (7, 13)

# The driver's class for these is that of the server's own trouble, although a value is at fault.
# 1365 division by zero, 1292, 1366, 1367 and 1411 a wrong value, as an emoji is in utf8mb3, 1300 a
# wrong encoding, 1242 and 1172 more than one row, 1329 and 1339 no row and no case in a trigger,
# 1369 WITH CHECK OPTION, 1526 no partition, 3140 no JSON. 1105 and 1644: by a function, and by
# SIGNAL, which may have a number of its own; 1422, 1424, 1442 and 1456 what a trigger must not do.
_OF_VALUES = frozenset(
    {1105, 1172, 1242, 1292, 1300, 1329, 1339, 1365, 1366, 1367, 1369, 1411, 1422, 1424, 1442}
    | {1456, 1526, 1644, 3140}
)
_HIGHEST_OF_SERVER = 20_000

# Of PostgreSQL's SQLSTATE 22 data exception, 42 syntax error or access rule violation. 1142 and
# 1143 no right, 1264 out of range, 1265 and 1406 cut off, 1292 and 1366 a wrong value.
_OF_CONSTANTS = frozenset({"22", "42"})
_OF_CONSTANT_NUMBERS = frozenset({1142, 1143, 1264, 1265, 1292, 1366, 1406})

# See above: of a row, or of a table.
_LOCK_NOT_AVAILABLE = "55P03"


def is_contention(error: BaseException) -> bool:
    """Return whether a claim's error is transient: another session has the lock."""
    cause = error.__cause__
    if _sqlstate(cause) in _SQLSTATES or _errno(cause) in _ERRNOS:
        return True
    return _sqlite_code(cause) in (_SQLITE_BUSY, _SQLITE_LOCKED)


def is_statement_timeout(error: BaseException) -> bool:
    """Return whether the database ended a statement that took too long."""
    cause = error.__cause__
    if _sqlstate(cause) == _CANCELED or _errno(cause) in _TIMED_OUT:
        return True
    return _sqlite_code(cause) == _SQLITE_INTERRUPT


def ends_transaction(error: Exception) -> bool:
    """Return whether the server rolled back the whole transaction without a ROLLBACK."""
    return _errno(error.__cause__) == _DEADLOCK


def was_ended_by_server(lost: ProcessorError) -> bool:
    """Return whether a transaction ended without a statement that ends it."""
    cause = lost.__cause__
    return isinstance(lost, SessionLost) or (
        isinstance(cause, Exception) and ends_transaction(cause)
    )


def unwritable(error: Exception, using: str) -> ProcessorError | None:
    """Return the error to raise if the database refuses every write, else ``None``."""
    cause = error.__cause__
    if _errno(cause) == _NEEDS_ROW_LOG:
        return Unsupported(
            f"expected binlog_format=ROW or MIXED on {using!r}, got STATEMENT, which cannot log "
            "what a transaction at READ COMMITTED writes; set it in the server's configuration."
        )
    read_only = _sqlstate(cause) in _READ_ONLY_STATES or _errno(cause) in _READ_ONLY
    return ReadOnlyDatabase(using) if read_only or _sqlite_code(cause) == _SQLITE_READONLY else None


def savepoint_is_gone(error: Exception) -> bool:
    """Return whether a savepoint could not be released because its transaction is gone."""
    cause = error.__cause__
    return (
        _sqlstate(cause) in _NO_SAVEPOINT_STATES
        or _errno(cause) == _NO_SAVEPOINT
        or _sqlite_code(cause) == _SQLITE_ERROR
    )


def may_pass(error: BaseException | None) -> bool:
    """Return whether the same statement may succeed a moment later; ``None``: no answer came."""
    if error is None:
        return True
    is_of_the_server = isinstance(error, OperationalError | InterfaceError)
    return is_of_the_server and _sqlite_code(error.__cause__) != _SQLITE_ERROR


# Classes of PostgreSQL's SQLSTATE that are about the values of a row: 20 no case, 21 more than one
# row of a subquery, 22 data exception, 23 integrity constraint violation, 27 triggered data change,
# 2F, 38 and 39 errors of functions, 44 WITH CHECK OPTION, 54 too large for an index or a type, P0
# an error that a function raised. Django has classes for most of these elsewhere.
_ABOUT_ROWS = frozenset({"20", "21", "22", "23", "27", "2F", "38", "39", "44", "54", "P0"})


def is_about_rows(error: BaseException) -> bool:
    """Return whether a row's values caused the error, so that other rows may have none."""
    state = _sqlstate(error.__cause__)
    if state:
        is_of_the_moment = state[:2] in _OF_THE_MOMENT - {"55"} or state == _LOCK_NOT_AVAILABLE
        is_by_row = _is_by_row(error.__cause__) and not is_of_the_moment
        return state[:2] in _ABOUT_ROWS or is_by_row
    number = _errno(error.__cause__) or 0
    is_of_values = number in _OF_VALUES or number > _HIGHEST_OF_SERVER
    return is_of_values or isinstance(error, DataError | IntegrityError)


def _is_by_row(cause: BaseException | None) -> bool:
    # A function of the project, such as a trigger's, may raise any error, for some rows only; the
    # one that is named is PostgreSQL's, for policies.
    found = getattr(cause, "diag", None)
    by_row = found and (found.context or found.source_function == "ExecWithCheckOptions")
    return bool(by_row)


def refuses_constant(error: BaseException) -> bool:
    """Return whether the database refuses to write these values, in whatever row."""
    cause = error.__cause__
    is_of_all = (_sqlstate(cause) or "")[:2] in _OF_CONSTANTS and not _is_by_row(cause)
    return is_of_all or _errno(cause) in _OF_CONSTANT_NUMBERS


def is_refusal(error: BaseException) -> bool:
    """Return whether the database has refused a statement, and would do so a moment later, too."""
    is_answer = is_database_error(error) and error.__cause__ is not None
    return is_answer and (is_about_rows(error) or is_refused_statement(error))


# object_not_in_prerequisite_state: no replica identity, or a view that cannot be written.
_NOT_READY = "55000"


def is_refused_statement(error: BaseException) -> bool:
    """Return whether a statement is refused, now and later, and not for the values of a row.

    SQLite has one code for these, and for a value that one of its functions refuses.
    """
    cause = error.__cause__
    if _sqlite_code(cause) == _SQLITE_ERROR or _sqlstate(cause) == _NOT_READY:
        return True
    return isinstance(
        error, ProgrammingError | NotSupportedError | DataError | IntegrityError
    ) and not is_about_rows(error)


# Of PostgreSQL: 40 transaction rollback, 53 insufficient resources, 55 object not in the right
# state, 57 operator intervention, 58 system error.
_OF_THE_MOMENT = frozenset({"40", "53", "55", "57", "58"})


def is_of_the_moment(error: BaseException) -> bool:
    """Return whether PostgreSQL may answer the same statement otherwise a moment later."""
    return (_sqlstate(error.__cause__) or "")[:2] in _OF_THE_MOMENT


def is_out_of_resources(error: BaseException) -> bool:
    """Return whether the database lacks the time or the room for this statement at the moment."""
    cause = error.__cause__
    if is_statement_timeout(error) or (_sqlstate(cause) or "")[:2] == "53":
        return True
    return _errno(cause) in _NO_ROOM or _sqlite_code(cause) in _SQLITE_NO_ROOM


def is_stale_plan(error: BaseException) -> bool:
    """Return whether the driver had prepared the statement before a column got another type."""
    found = getattr(error.__cause__, "diag", None)
    return found is not None and found.source_function == "RevalidateCachedQuery"


def is_database_error(error: BaseException) -> bool:
    """Return whether the error came from the database; ``InterfaceError`` is a separate class."""
    return isinstance(error, DatabaseError | InterfaceError)


def _sqlstate(cause: BaseException | None) -> str | None:
    # The attribute is sqlstate in psycopg 3, and pgcode in psycopg2.
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def _errno(cause: BaseException | None) -> int | None:
    code = cause.args[0] if cause is not None and cause.args else None
    return code if isinstance(code, int) else None


def _sqlite_code(cause: BaseException | None) -> int | None:
    code = getattr(cause, "sqlite_errorcode", None)
    # Extended result codes keep the primary one in their low byte.
    return None if code is None else code & 0xFF
