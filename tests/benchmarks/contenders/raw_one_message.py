"""The bare driver with one message per row: flip, COMMIT, BEGIN and the next row's lock together.

The statements are those of ``raw``, in simple queries of several statements. It is a bound that
this package cannot reach: a row's flip is sent with its COMMIT, so whether the flip wrote the row
is known only after the commit.
"""

from __future__ import annotations

from typing import Any

import psycopg

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.contenders.raw import FLIP, LOCK, connect, windows, with_keys
from tests.benchmarks.rows import fill as prepare
from tests.benchmarks.rows import left

__all__ = ["drain", "left", "prepare"]

END = with_keys(FLIP, [0]) + b"; COMMIT"
BEGIN = b"BEGIN; " + with_keys(LOCK, [0])


def drain(workers: int) -> Drained:
    """Handle each row between the message that locks it and the one that flips it."""
    handle, handled = handling.handle, 0
    with connect(prepared=False) as driver, driver.cursor() as cursor:
        for keys in windows(cursor):
            row = _last(cursor.execute(BEGIN, [keys[0]]))
            for following in (*keys[1:], None):
                if row is not None:
                    handle(row[0])
                    handled += 1
                row = _settle_and_lock(cursor, row, following)
    return Drained(handled)


def _settle_and_lock(cursor: psycopg.Cursor[Any], row: Any, following: int | None) -> Any:
    """Send the one message of a row, which also locks the following one; return that, if free."""
    statements: list[bytes] = [b"COMMIT"] if row is None else [END]
    values = [] if row is None else [row[0], row[-1]]
    if following is not None:
        statements.append(BEGIN)
        values.append(following)
    cursor.execute(b"; ".join(statements), values)
    if row is not None and cursor.rowcount != 1:
        raise RuntimeError(f"expected the flip to write row {row[0]}, got {cursor.rowcount} rows.")
    return _last(cursor) if following is not None else None


def _last(cursor: psycopg.Cursor[Any]) -> Any:
    """Return the row of the last statement that was sent, if it found one."""
    while cursor.nextset():
        pass
    return cursor.fetchone()
