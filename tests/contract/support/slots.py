"""The sessions that hold slots of a processor with ``max_workers``, as the server knows them."""

from __future__ import annotations

from django.db import connection

from dcl_processor.locking import slots

#: PostgreSQL's advisory locks in the test database.
_HOLDERS = """
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND database =
    (SELECT oid FROM pg_database WHERE datname = current_database())
"""


def holders(label: str, most: int) -> list[int]:
    """Return the sessions that hold the processor's slots, one for each slot that is taken."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_HOLDERS)
            return [pid for (pid,) in cursor.fetchall()]
        locks = slots.SessionLocks(label)
        locks._database = str(connection.settings_dict["NAME"])
        found = []
        for slot in range(most):
            cursor.execute("SELECT IS_USED_LOCK(%s)", [locks._name(slot)])
            found += [session for (session,) in cursor.fetchall() if session is not None]
        return found
