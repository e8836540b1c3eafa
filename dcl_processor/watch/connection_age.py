"""Closes old connections between the runs of a long-lived process.

A session that never ends keeps its cache of every table, and stays on the server that it first
connected to: after a failover, or behind a proxy, that is the wrong server.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

from dcl_processor import steady as time

#: Seconds after which a connection is closed, whatever CONN_MAX_AGE is.
OLDEST = 600.0


class Recycler:
    """Records when each connection of this thread was opened."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[Any, float]] = {}

    def between_runs(self) -> None:
        """Close connections that are too old."""
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
        """Close, as Django after a request, broken connections and those over CONN_MAX_AGE."""
        for wrapper in connections.all(initialized_only=True):
            if not wrapper.in_atomic_block:
                wrapper.close_if_unusable_or_obsolete()
                if wrapper.connection is None:
                    self._since.pop(wrapper.alias, None)

    def _close(self, wrapper: Any) -> None:
        wrapper.close()
        del self._since[wrapper.alias]
