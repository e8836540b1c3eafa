"""The bare driver with the statements that this package sends, and as queues in a table use it.

A test compares them with what the server is really sent: those of TRANSACTIONAL, and the one of
AT_MOST_ONCE. ``prepared`` is the driver's own way,
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
CLAIM = f"""WITH taken (taken, before_0) AS MATERIALIZED (
    SELECT id, done FROM {TABLE} WHERE NOT done AND id {{these}} FOR NO KEY UPDATE SKIP LOCKED
) UPDATE {TABLE} SET done = true FROM taken WHERE {TABLE}.id = taken.taken
RETURNING {", ".join(f"{TABLE}.{column}" for column in COLUMNS)},
{TABLE}.id, taken.before_0, {TABLE}.done"""
#: The next rows from the head, in one statement: there is no lock-free read, and each claim looks
#: for the head anew, past whatever lies dead there.
HEAD = f"""WITH taken AS MATERIALIZED (
    SELECT id FROM {TABLE} WHERE NOT done ORDER BY id LIMIT %s FOR NO KEY UPDATE SKIP LOCKED
) UPDATE {TABLE} SET done = true FROM taken WHERE {TABLE}.id = taken.id
RETURNING {", ".join(f"{TABLE}.{column}" for column in COLUMNS)}"""


def drain(workers: int, *, batch_size: int, prepared: bool = False) -> Drained:
    handle, handled = handling.handle, 0
    with connect(prepared=prepared) as driver, driver.cursor() as cursor:
        for batch in batches(cursor, batch_size):
            with driver.transaction():
                rows = cursor.execute(with_keys(LOCK, batch), given(batch)).fetchall()
                got = [row[0] for row in rows]
                for pk in got:
                    handle(pk)
                if got:
                    cursor.execute(with_keys(FLIP, got), [*given(got), rows[0][-1]])
            handled += len(got)
    return Drained(handled)


def drain_claims(workers: int, *, batch_size: int, prepared: bool = False) -> Drained:
    handle, handled = handling.handle, 0
    with connect(prepared=prepared) as driver, driver.cursor() as cursor:
        for batch in batches(cursor, batch_size):
            rows = cursor.execute(with_keys(CLAIM, batch), given(batch)).fetchall()
            for row in rows:
                handle(row[0])
            handled += len(rows)
    return Drained(handled)


def drain_head(workers: int, *, batch_size: int) -> Drained:
    handle, handled = handling.handle, 0
    with connect(prepared=True) as driver, driver.cursor() as cursor:
        while rows := cursor.execute(HEAD.encode(), [batch_size]).fetchall():
            for row in rows:
                handle(row[0])
            handled += len(rows)
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


def batches(cursor: psycopg.Cursor[Any], size: int) -> Iterator[list[int]]:
    for keys in windows(cursor):
        for start in range(0, len(keys), size):
            yield keys[start : start + size]


def with_keys(statement: str, keys: list[int]) -> bytes:
    return statement.format(these="= ANY(%s)" if len(keys) > 1 else "= %s").encode()


def given(keys: list[int]) -> list[Any]:
    """Return the parameters of a statement with these keys: many are one list."""
    return [keys] if len(keys) > 1 else keys
