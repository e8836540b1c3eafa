"""The bare driver as queues in a table use it: claim the next rows from the head, in one statement.

There is no lock-free read. Each claim looks for the head anew, past whatever lies dead there.
"""

from __future__ import annotations

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.contenders.raw import connect
from tests.benchmarks.rows import COLUMNS, TABLE, left
from tests.benchmarks.rows import fill as prepare

__all__ = ["drain", "left", "prepare"]

CLAIM = f"""WITH taken AS MATERIALIZED (
    SELECT id FROM {TABLE} WHERE NOT done ORDER BY id LIMIT %s FOR NO KEY UPDATE SKIP LOCKED
) UPDATE {TABLE} SET done = true FROM taken WHERE {TABLE}.id = taken.id
RETURNING {", ".join(f"{TABLE}.{column}" for column in COLUMNS)}"""


def drain(workers: int, *, batch_size: int, limit: int | None = None) -> Drained:
    """Drain, or handle ``limit`` rows."""
    handle, handled = handling.handle, 0
    with connect(prepared=True) as driver, driver.cursor() as cursor:
        while handled != limit:
            rows = cursor.execute(CLAIM.encode(), [batch_size]).fetchall()
            for row in rows:
                handle(row[0])
            if not rows:
                break
            handled += len(rows)
    return Drained(handled)
