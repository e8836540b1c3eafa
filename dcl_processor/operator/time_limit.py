"""Time limits that the database itself enforces: of statements that only read, and of waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from django.db import Error, connections, transaction

from dcl_processor.pending import steady as time

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
        name, value = (
            ("max_statement_time", f"{milliseconds / 1000:.3f}")
            if connection.mysql_is_mariadb
            else ("max_execution_time", str(milliseconds))
        )
        with _session_limits(connection, {name: value}):
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
def lock_timeout(using: str, seconds: float, *, waits_alone: bool = False) -> Iterator[None]:
    """Limit the time that a block's statements, in a transaction, wait for locks.

    MariaDB counts waits in whole seconds. So there each statement is limited as a whole, which
    suits a statement for one row, unless the limit is for ``waits_alone``.
    """
    connection: Any = connections[using]
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {bounded(seconds)}")
    elif connection.vendor == "mysql":
        if connection.mysql_is_mariadb and not waits_alone:
            limits = {"max_statement_time": f"{bounded(seconds) / 1000:.3f}"}
        else:
            # Of rows, and of tables, which a LOCK TABLES or a migration has. Whole seconds only,
            # and on MySQL at least one.
            whole = f"{math.ceil(seconds)}"
            limits = {"innodb_lock_wait_timeout": whole, "lock_wait_timeout": whole}
        with _session_limits(connection, limits):
            yield
        return
    yield


@contextmanager
def _session_limits(connection: Any, limits: Mapping[str, str]) -> Iterator[None]:
    """Set limits of MariaDB or MySQL, which has none for a transaction, and set them back.

    Also in a transaction that an error has marked for a rollback, in which Django sends nothing.
    """
    # The session's own values may be other ones than the server's defaults.
    kept = [f"@dcl_{name} = @@SESSION.{name}" for name in limits]
    limited = [f"SESSION {name} = {value}" for name, value in limits.items()]
    restored = [f"SESSION {name} = @dcl_{name}" for name in limits]
    with connection.cursor() as cursor:
        cursor.execute(f"SET {', '.join(kept + limited)}")
    try:
        yield
    finally:
        is_marked = connection.needs_rollback
        connection.needs_rollback = False
        try:
            # A session that is lost has no limit to set back; the block's own error is raised.
            with suppress(Error), connection.cursor() as cursor:
                cursor.execute(f"SET {', '.join(restored)}")
        finally:
            connection.needs_rollback = is_marked
