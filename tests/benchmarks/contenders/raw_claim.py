"""The bare driver with the one statement that this package sends for AT_MOST_ONCE."""

from __future__ import annotations

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.contenders.raw import connect, given, windows, with_keys
from tests.benchmarks.rows import COLUMNS, TABLE, left
from tests.benchmarks.rows import fill as prepare

__all__ = ["drain", "left", "prepare"]

CLAIM = f"""WITH taken (taken, before_0) AS MATERIALIZED (
    SELECT id, done FROM {TABLE} WHERE NOT done AND id {{these}} FOR NO KEY UPDATE SKIP LOCKED
) UPDATE {TABLE} SET done = true FROM taken WHERE {TABLE}.id = taken.taken
RETURNING {", ".join(f"{TABLE}.{column}" for column in COLUMNS)},
{TABLE}.id, taken.before_0, {TABLE}.done"""


def drain(workers: int, *, batch_size: int, prepared: bool = False) -> Drained:
    handle, handled = handling.handle, 0
    with connect(prepared=prepared) as driver, driver.cursor() as cursor:
        for keys in windows(cursor):
            for start in range(0, len(keys), batch_size):
                batch = keys[start : start + batch_size]
                rows = cursor.execute(with_keys(CLAIM, batch), given(batch)).fetchall()
                for row in rows:
                    handle(row[0])
                handled += len(rows)
    return Drained(handled)
