"""A time limit of each statement, which the database itself enforces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction

#: Milliseconds: 0 would be no limit, and more than an ``int`` of 32 bits is refused.
_LEAST, _MOST = 1, 2**31 - 1


@contextmanager
def reading(using: str, seconds: float) -> Iterator[None]:
    """Limit each statement of a block that only reads.

    The limit is the server's own, because a client that gives up leaves its statement running. A
    statement that takes longer raises an error that ``is_statement_timeout()`` recognises. On
    PostgreSQL the block is a transaction, or a savepoint, and its rollback ends the limit. SQLite
    has no limit, and gets no transaction, which may begin with its write lock; nor has MySQL.
    """
    if connections[using].vendor != "postgresql":
        with time_limit(using, seconds):
            yield
        return
    with transaction.atomic(using=using), time_limit(using, seconds):
        yield
        transaction.set_rollback(True, using=using)


@contextmanager
def time_limit(using: str, seconds: float) -> Iterator[None]:
    """Limit each statement of the block; on PostgreSQL until the end of its transaction."""
    connection: Any = connections[using]
    milliseconds = round(min(max(seconds * 1000, _LEAST), _MOST))
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {milliseconds}")
        yield
    elif connection.vendor == "mysql" and connection.mysql_is_mariadb:
        limit = f"SET STATEMENT max_statement_time = {milliseconds / 1000:.3f} FOR"

        def limited(execute: Any, sql: str, *arguments: Any) -> Any:
            return execute(f"{limit} {sql}", *arguments)

        with connection.execute_wrapper(limited):
            yield
    else:
        yield
