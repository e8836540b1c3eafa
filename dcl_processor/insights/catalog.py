"""What PostgreSQL says of its sessions; what it hides from a role is ``None``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from django.db import connections

# A snapshot keeps dead rows of its database from being removed, and so does a transaction that has
# an id, such as that of a locked row. The snapshot of a standby, which comes through a slot or its
# walsender, does so in all databases; a slot's catalog_xmin concerns the catalogs alone.
_SNAPSHOTS = """
SELECT CASE backend_type WHEN 'walsender' THEN 'walsender' ELSE 'session' END, pid::text,
    application_name, greatest(age(backend_xmin), age(backend_xid)),
    extract(epoch FROM clock_timestamp() - xact_start), usename
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND pid <> pg_backend_pid()
    AND (datid = 0 OR datid IS NULL OR datname = current_database())
    AND usesysid IS NOT NULL -- an autovacuum worker has no role, and not every role sees its type
UNION ALL
SELECT 'replication slot', slot_name, '', age(xmin), NULL, NULL
FROM pg_replication_slots WHERE xmin IS NOT NULL
UNION ALL
SELECT 'prepared transaction', gid, '', age(transaction),
    extract(epoch FROM clock_timestamp() - prepared), owner
FROM pg_prepared_xacts WHERE database = current_database()
"""


class Snapshot(NamedTuple):
    """What keeps dead rows from being removed.

    ``kind``: "session", "walsender", which has the snapshot of a standby, "replication slot" or
    "prepared transaction"; ``name``: its process id or its name. ``transactions``: how many began
    since; ``seconds``: how long ago it began, ``None`` if this role may not see that, or there is
    no such time; ``role``: whose it is.
    """

    kind: str
    name: str
    application_name: str | None
    transactions: int
    seconds: Any
    role: str | None


def rows(
    using: str, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()
) -> list[tuple[Any, ...]]:
    """Return the answer of a query."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return cast("list[tuple[Any, ...]]", cursor.fetchall())


def snapshots(using: str) -> list[Snapshot]:
    """Return what keeps dead rows of this database, the oldest first; this session excluded."""
    found = [Snapshot(*row) for row in rows(using, _SNAPSHOTS)]
    return sorted(found, key=lambda each: each.transactions, reverse=True)
