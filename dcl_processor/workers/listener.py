"""Receives the notifications that ``wake()`` sends, on a connection of its own.

LISTEN belongs to a session, which PgBouncer in transaction mode gives to another client after each
statement. The connection that handles rows may be closed while it is idle; this one stays open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from django.db import Error, connections

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.diagnosis import one_line
from dcl_processor.operator.times import backoff
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.workers.notify import alias
from dcl_processor.workers.visible import operations


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
        self._failures = 0
        return set(self.names.values())

    def _lost(self, error: Exception) -> set[str]:
        self.close()
        self._failures += 1
        self._retry_at = time.monotonic() + backoff(self._failures)
        if self._failures > 1:
            return set()
        operations.warning(
            "LISTEN failed on %r, and rows are found by polling until it works again: %s",
            self.using,
            one_line(error),
        )
        return set(self.names.values())


def aliases(processors: Iterable[Definition[Any]], using: str | None) -> dict[str, str]:
    """Return the alias on which each processor is woken, by the processor's name.

    Leaves out processors whose question cannot be asked: the run will report why.
    """
    found: dict[str, str] = {}
    for processor in processors:
        with suppress(Exception):
            found[processor.name] = alias(processor, using)
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
