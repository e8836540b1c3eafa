"""Receives the notifications that ``wake()`` sends, on its own connection.

LISTEN belongs to a session, which PgBouncer in transaction mode gives to another client after each
statement. The connection that handles rows may be closed while it is idle; this one stays open.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db import Error, connections

from dcl_processor import steady as time
from dcl_processor.diagnosis import one_line
from dcl_processor.exceptions import Unsupported

from . import notify
from .polling import BACKOFF

if TYPE_CHECKING:
    from dcl_processor.processor import BatchProcessor

#: Shown by the command in any case.
logger = logging.getLogger("dcl_processor.operations")


class Listener:
    """One database's notifications; ``names`` are the processors by their channels."""

    def __init__(self, using: str, names: Mapping[str, str]) -> None:
        check_can_listen(using)
        self.using = using
        self.names = names
        wrapper: Any = connections[using]
        # The driver's own errors too, because notifications are not read by Django's cursor.
        self._errors = (Error, wrapper.Database.Error)
        self._wrapper: Any = None
        self._open_until = 0.0
        self._retry_at = 0.0
        self._failures = 0

    @property
    def is_open(self) -> bool:
        return self._wrapper is not None

    def fileno(self) -> int:
        """Return the file descriptor to wait on until there is a notification."""
        return int(self._wrapper.connection.fileno())

    def poll(self) -> set[str]:
        """Return the processors to run now, each once in a burst.

        All of them if the connection is new, because notifications may have been missed before it.
        None, with a warning in the log, while no connection can be opened: watchers poll as well.
        """
        try:
            if not self.is_open:
                return self._open() if time.monotonic() >= self._retry_at else set()
            if time.monotonic() >= self._open_until:
                self.close()
                return self._open()
            driver = self._wrapper.connection
            notifications = driver.notifies(timeout=0)
            # Through a pooler another client may have asked for more channels in this session.
            return {
                self.names[each.channel] for each in notifications if each.channel in self.names
            }
        except self._errors as error:
            return self._lost(error)

    def close(self) -> None:
        """End the session."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            wrapper.close()

    def _open(self) -> set[str]:
        wrapper = connections[self.using].copy()
        # Without the pool, which expects its connections back.
        wrapper.settings_dict["OPTIONS"].pop("pool", None)
        try:
            with wrapper.cursor() as cursor:
                for channel in self.names:
                    quoted = channel.replace('"', '""')
                    cursor.execute(f'LISTEN "{quoted}"')
        except BaseException:
            wrapper.close()
            raise
        self._wrapper = wrapper
        self._open_until = time.monotonic() + OLDEST
        self._failures = 0
        return set(self.names.values())

    def _lost(self, error: Exception) -> set[str]:
        self.close()
        self._failures += 1
        self._retry_at = time.monotonic() + BACKOFF.after(self._failures)
        if self._failures > 1:
            return set()
        logger.warning(
            "LISTEN failed on %r, and rows are found by polling until it works again: %s",
            self.using,
            one_line(error),
        )
        return set(self.names.values())


def aliases(processors: Iterable[BatchProcessor[Any]], using: str | None) -> dict[str, str]:
    """Return the alias on which each processor is woken, by the processor's name.

    Leaves out processors whose question cannot be asked: the run will report why.
    """
    found: dict[str, str] = {}
    for processor in processors:
        with suppress(Exception):
            found[processor.name] = notify.alias(processor, using)
    return found


def check_can_listen(using: str) -> None:
    """Raise ``Unsupported`` if the alias does not support LISTEN; sends no query."""
    wrapper: Any = connections[using]
    connection_class = getattr(wrapper.Database, "Connection", None)
    if wrapper.vendor != "postgresql" or not hasattr(connection_class, "notifies"):
        raise Unsupported(
            "expected PostgreSQL with psycopg 3 for every processor with --listen, got "
            f"{wrapper.settings_dict['ENGINE']!r} as {using!r}; leave --listen out, and poll."
        )


# --- closes old connections between the runs of a long-lived process
#
# A session that never ends keeps its cache of every table, and stays on the server that it first
# connected to: after a failover, or behind a proxy, that is the wrong server.


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
