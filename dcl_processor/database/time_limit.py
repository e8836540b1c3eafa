"""A time limit that the database itself enforces, for statements that only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import Error, connections, transaction

from dcl_processor import steady as time

#: Milliseconds: 0 would be no limit, and more than an ``int`` of 32 bits is refused.
_LEAST, _MOST = 1, 2**31 - 1

#: Instructions of SQLite's virtual machine between two looks at the clock.
_INSTRUCTIONS = 10_000


@contextmanager
def reading(using: str, seconds: float) -> Iterator[None]:
    """Open a transaction of which each statement may take so long, and roll it back at the end.

    The limit is the server's own, because a client that gives up leaves its statement running. A
    statement that takes longer raises an error that ``is_statement_timeout()`` recognises. SQLite
    gets no transaction, and the statements together get so long.
    """
    connection: Any = connections[using]
    if connection.vendor == "sqlite":
        # With transaction_mode IMMEDIATE or EXCLUSIVE every transaction of Django takes the write
        # lock: a question would wait for each handler, and workers for the question.
        connection.ensure_connection()
        with _limited_statements(connection, seconds):
            yield
        return
    with transaction.atomic(using=using):
        with _limited_statements(connection, seconds):
            yield
        # Nothing was written, and the rollback of a savepoint ends the limit with it.
        transaction.set_rollback(True, using=using)


def bounded(seconds: float) -> int:
    """Return a time limit in milliseconds, as all databases accept it."""
    return round(min(max(seconds * 1000, _LEAST), _MOST))


@contextmanager
def _limited_statements(connection: Any, seconds: float) -> Iterator[None]:
    milliseconds = bounded(seconds)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {milliseconds}")
        yield
    elif connection.vendor == "mysql":
        with _session_limit(connection, milliseconds):
            yield
    elif connection.vendor == "sqlite":
        end = time.monotonic() + seconds
        driver = connection.connection
        driver.set_progress_handler(lambda: int(time.monotonic() > end), _INSTRUCTIONS)
        try:
            yield
        finally:
            driver.set_progress_handler(None, 0)
    else:
        yield


@contextmanager
def _session_limit(connection: Any, milliseconds: int) -> Iterator[None]:
    """Set the limit of MariaDB or MySQL, which has none for a transaction, and set it back."""
    name, value = (
        ("max_statement_time", f"{milliseconds / 1000:.3f}")
        if connection.mysql_is_mariadb
        else ("max_execution_time", str(milliseconds))
    )
    with connection.cursor() as cursor:
        # The session's own value may be another one than the server's default.
        cursor.execute(f"SET @dcl_{name} = @@SESSION.{name}, SESSION {name} = {value}")
    try:
        yield
    finally:
        # A session that is lost has no limit to set back.
        with suppress(Error), connection.cursor() as cursor:
            cursor.execute(f"SET SESSION {name} = @dcl_{name}")
