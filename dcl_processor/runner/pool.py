"""Checks that a connection pool has room for a run; a thread without a connection would wait."""

from __future__ import annotations

from typing import Any

from django.db import connections

from dcl_processor.exceptions import Unsupported


def refuse_small_pool(
    using: str, label: str, *, threads: int, heartbeat: bool, overseer: int = 0
) -> None:
    """Raise ``Unsupported`` unless the alias's pool has a connection for each thread of a run.

    ``threads``: the threads besides the run's own. Sends no query.
    """
    connection: Any = connections[using]
    pool = getattr(connection, "pool", None)
    # Inside TestCase there is one connection and no heartbeat.
    if pool is None or connection.in_atomic_block:
        return
    needed = 1 + threads + heartbeat + overseer
    if pool.max_size < needed:
        each = f", one for each of {threads} threads" if threads else ""
        renewals = ", and one for the heartbeat" if heartbeat else ""
        renewals += ", and one for the ledger" if overseer else ""
        raise Unsupported(
            f"{label}: expected a connection pool on {using!r} with room for {needed} connections, "
            f"one for the run{each}{renewals}, got max_size={pool.max_size}; raise max_size in "
            "OPTIONS['pool'], or lower concurrency."
        )
