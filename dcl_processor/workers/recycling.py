"""Closes connections that have grown old, between the runs of a process that lives long.

A session that is never ended keeps what it has cached of every table, and stays with the server it
once found: after a failover, or behind a proxy, that is the wrong one.
"""

from __future__ import annotations

import time
from typing import Any

from django.db import connections

#: Seconds after which a connection is closed, whatever CONN_MAX_AGE says.
OLDEST = 600.0


class Recycler:
    """Knows since when each connection of this thread is open."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Any, float]] = {}

    def between_runs(self) -> None:
        """Close what is too old."""
        now = time.monotonic()
        for wrapper in connections.all(initialized_only=True):
            if wrapper.connection is None or wrapper.in_atomic_block:
                continue
            known, since = self._since.get(wrapper.alias, (None, now))
            if known is not wrapper.connection:
                self._since[wrapper.alias] = wrapper.connection, now
            elif now - since >= OLDEST:
                self._close(wrapper)

    def before_waiting(self) -> None:
        """Close what Django would at the end of a request: the broken, and CONN_MAX_AGE's."""
        for wrapper in connections.all(initialized_only=True):
            if not wrapper.in_atomic_block:
                wrapper.close_if_unusable_or_obsolete()
                if wrapper.connection is None:
                    self._since.pop(wrapper.alias, None)

    def _close(self, wrapper: Any) -> None:
        wrapper.close()
        del self._since[wrapper.alias]
