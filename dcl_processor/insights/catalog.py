"""What PostgreSQL's catalogs and statistics say; no special role is needed to ask them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from django.db import connections

# A snapshot keeps dead rows of its database from being removed, and so does a transaction that has
# an id, such as that of a locked row. The snapshot of a standby, which comes through a slot or its
# walsender, does so in all databases; a slot's catalog_xmin concerns the catalogs alone.
_OLD_SNAPSHOTS = """
SELECT kind, name, seconds, transactions FROM (
    SELECT CASE backend_type WHEN 'walsender' THEN 'walsender' ELSE 'session' END AS kind,
        concat_ws(', ', pid, nullif(application_name, ''), 'role ' || usename) AS name,
        greatest(age(backend_xmin), age(backend_xid)) AS transactions,
        extract(epoch FROM clock_timestamp() - xact_start)::float AS seconds
    FROM pg_stat_activity
    WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
        AND (datid = 0 OR datid IS NULL OR datname = current_database())
        AND usesysid IS NOT NULL -- an autovacuum worker has no role
    UNION ALL
    SELECT 'replication slot', slot_name, age(xmin), NULL
    FROM pg_replication_slots WHERE xmin IS NOT NULL
    UNION ALL
    SELECT 'prepared transaction', gid, age(transaction),
        extract(epoch FROM clock_timestamp() - prepared)
    FROM pg_prepared_xacts WHERE database = current_database()
) AS _snapshots
WHERE CASE WHEN seconds IS NULL THEN transactions >= %s ELSE seconds >= %s END
ORDER BY transactions DESC
"""


def rows(
    using: str, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()
) -> list[tuple[Any, ...]]:
    """Return the answer of a query."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return cast("list[tuple[Any, ...]]", cursor.fetchall())


def old_snapshots(using: str, seconds: float, transactions: int) -> list[tuple[Any, ...]]:
    """Return what has kept dead rows for so long: its kind, its name, and its age in both units.

    ``transactions``: where this role may not see the seconds, or there is no such time.
    """
    return rows(using, _OLD_SNAPSHOTS, [transactions, seconds])
