"""The bare driver with the statements of TRANSACTIONAL, which a test compares with ours."""

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
WHERE NOT done AND id = ANY(%s) FOR NO KEY UPDATE SKIP LOCKED"
FLIP = f"UPDATE {TABLE} SET done = true WHERE id = ANY(%s) AND pg_current_xact_id() = %s"


def drain(*, batch_size: int) -> Drained:
    handle, handled = handling.handle, 0
    with connect() as driver, driver.cursor() as cursor:
        for batch in _batches(cursor, batch_size):
            with driver.transaction():
                rows = cursor.execute(LOCK.encode(), [batch]).fetchall()
                got = [row[0] for row in rows]
                for pk in got:
                    handle(pk)
                if got:
                    cursor.execute(FLIP.encode(), [got, rows[0][-1]])
            handled += len(got)
    return Drained(handled)


def connect(host: str = "") -> psycopg.Connection[Any]:
    """Connect as Django does, except for what it adds to the driver; ``host`` replaces its host."""
    given = connection.get_connection_params()
    if host:
        given["host"] = host
    for django_s_own in ("cursor_factory", "context", "prepare_threshold"):
        given.pop(django_s_own, None)
    return psycopg.connect(**given, autocommit=True, cursor_factory=psycopg.ClientCursor)


def _batches(cursor: psycopg.Cursor[Any], size: int) -> Iterator[list[int]]:
    """Read what is pending in windows of keys, as this package does."""
    last = 0
    while keys := [key for (key,) in cursor.execute(KEYS.encode(), [last]).fetchall()]:
        for start in range(0, len(keys), size):
            yield keys[start : start + size]
        last = keys[-1]
