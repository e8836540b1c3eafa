"""What child processes need of the databases: their names, and that they can see the rows."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from typing import Any

from django.db import DatabaseError, connections

from dcl_processor.database.sight import refuse_others, sight, tenant_of
from dcl_processor.exceptions import Unsupported

from .child import is_program


def databases_for_children() -> dict[str, Any]:
    """Return the databases' names by alias; close own connections until the workers have ended.

    Raises ``Unsupported`` where other processes could not see the rows.
    """
    check_children_can_see_rows()
    connections.close_all()
    return {alias: database["NAME"] for alias, database in connections.databases.items()}


def check_children_can_see_rows() -> None:
    """Raise ``Unsupported`` where other processes could not see the rows."""
    if "DJANGO_SETTINGS_MODULE" not in os.environ and not is_program():
        raise Unsupported(
            "expected DJANGO_SETTINGS_MODULE to name the settings, got settings made by "
            "configure(), which other processes cannot read; run one worker."
        )
    for connected in connections.all(initialized_only=True):
        if connected.in_atomic_block:
            raise Unsupported(
                f"expected no open transaction on {connected.alias!r}, got one: workers are other "
                "processes, which see only committed rows; in tests use TransactionTestCase."
            )
        with suppress(DatabaseError):  # a server that is away is the children's own matter
            _check_sight(connected)
    for alias in connections:
        in_memory: Any = getattr(connections[alias], "is_in_memory_db", None)
        if in_memory is not None and in_memory():
            raise Unsupported(
                f"expected a database that other processes can open, got {alias!r} in this "
                "process's memory; use a file, or run one worker."
            )


def _check_sight(connected: Any) -> None:
    """Raise ``Unsupported`` if a new session would see other rows than the one that is open."""
    if connected.connection is None and not tenant_of(connected):
        return
    fresh: Any = connected.copy()
    fresh.settings_dict["OPTIONS"].pop("pool", None)  # this process may have all of its sessions
    with closing(fresh):
        refuse_others(sight(connected), fresh, "expected workers", "run one worker")
