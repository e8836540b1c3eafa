"""The bare driver with the statements that this package sends for TRANSACTIONAL.

A test compares them with what the server is really sent. ``prepared`` is the driver's own way,
which Django turns off: the server gets the values apart from the text, and keeps the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
from django.db import connection

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import COLUMNS, TABLE, left
from tests.benchmarks.rows import fill as prepare

__all__ = ["drain", "left", "prepare"]

WINDOW = 500

KEYS = f"SELECT id FROM {TABLE} WHERE NOT done AND id > %s ORDER BY id LIMIT {WINDOW}"
LOCK = f"SELECT {', '.join(COLUMNS)}, pg_current_xact_id() FROM {TABLE} \
WHERE NOT done AND id {{these}} \
FOR NO KEY UPDATE SKIP LOCKED"
FLIP = f"UPDATE {TABLE} SET done = true WHERE (id {{these}} AND pg_current_xact_id() = %s)"


def drain(workers: int, *, batch_size: int, prepared: bool = False) -> Drained:
    handle, handled = handling.handle, 0
    with connect(prepared=prepared) as driver, driver.cursor() as cursor:
        for keys in windows(cursor):
            for start in range(0, len(keys), batch_size):
                batch = keys[start : start + batch_size]
                with driver.transaction():
                    rows = cursor.execute(with_keys(LOCK, batch), given(batch)).fetchall()
                    got = [row[0] for row in rows]
                    for pk in got:
                        handle(pk)
                    if got:
                        cursor.execute(with_keys(FLIP, got), [*given(got), rows[0][-1]])
                handled += len(got)
    return Drained(handled)


def connect(*, prepared: bool, host: str = "") -> psycopg.Connection[Any]:
    """Connect as Django does, except for what it adds to the driver; ``host`` replaces its host."""
    given = connection.get_connection_params()
    if host:
        given["host"] = host
    for django_s_own in ("cursor_factory", "context", "prepare_threshold"):
        given.pop(django_s_own, None)
    cursor = psycopg.Cursor if prepared else psycopg.ClientCursor
    return psycopg.connect(**given, autocommit=True, cursor_factory=cursor)


def windows(cursor: psycopg.Cursor[Any]) -> Iterator[list[int]]:
    """Read what is pending in windows of keys, as this package does."""
    last = 0
    while keys := [key for (key,) in cursor.execute(KEYS.encode(), [last]).fetchall()]:
        yield keys
        last = keys[-1]


def with_keys(statement: str, keys: list[int]) -> bytes:
    return statement.format(these="= ANY(%s)" if len(keys) > 1 else "= %s").encode()


def given(keys: list[int]) -> list[Any]:
    """Return the parameters of a statement with these keys: many are one list."""
    return [keys] if len(keys) > 1 else keys
