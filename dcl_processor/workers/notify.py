"""Wakes the watchers of a processor by PostgreSQL's NOTIFY, and listens for that.

A notification is a hint and carries no row: a watcher that receives one reads the pending rows, as
after any other wait. A lost notification costs a watcher the rest of its interval, nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections, transaction

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.times import backoff
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import ask
from dcl_processor.report.errors import described

logger = logging.getLogger("dcl_processor")
operations = logging.getLogger("dcl_processor.operations")

# PostgreSQL's NAMEDATALEN, less the final zero: bytes.
_LONGEST_CHANNEL = 63


def channel(name: str) -> str:
    """Return the channel of the processor of this name; ``LISTEN`` needs it in double quotes."""
    plain = f"dcl_processor.{name}"
    if len(plain.encode()) <= _LONGEST_CHANNEL:
        return plain
    # If names were only cut to the length, two long names could share a channel.
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"dcl_processor.{digest}"[:_LONGEST_CHANNEL]


def alias(processor: Definition[Any], using: str | None = None) -> str:
    """Return the alias on which the processor's watchers are woken: its rows are written there."""
    if chosen := using or processor.using:
        return chosen
    return ask(processor.pending, label=processor.name).using


def wake(processor: Definition[Any]) -> None:
    """Notify the processor's watchers once the rows that they are to find are committed."""
    using = alias(processor)
    connection = connections[using]
    if connection.vendor != "postgresql":  # which alone has LISTEN and NOTIFY
        return
    notify = _Notify(using, channel(processor.name))
    if not connection.in_atomic_block:
        notify()
    elif all(planned != notify for _, planned, *_ in connection.run_on_commit):
        # Not inside the transaction: PostgreSQL commits transactions with a NOTIFY one at a time.
        transaction.on_commit(notify, using=using)


@dataclass(frozen=True, slots=True)
class _Notify:
    """A callback of a transaction, which needs one of the same channel only once."""

    using: str
    channel: str

    def __call__(self) -> None:
        try:
            with connections[self.using].cursor() as cursor:
                cursor.execute("SELECT pg_notify(%s, '')", [self.channel])
        except Error as error:
            # The rows are committed, and will be found, so the caller need not fail.
            why = described(error)
            logger.warning("the watchers on %r were not notified: %s", self.channel, why)


class Listener:
    """One database's notifications; ``names`` are the processors by their channels.

    LISTEN belongs to a session, which PgBouncer in transaction mode gives to another client after
    each statement. The connection that handles rows may be closed while it is idle; this one stays.

    Raises ``Unsupported`` if the alias does not support LISTEN; sends no query.
    """

    def __init__(self, using: str, names: Mapping[str, str]) -> None:
        self.using, self.names = using, names
        wrapper: Any = connections[using]
        connection_class = getattr(wrapper.Database, "Connection", None)
        if wrapper.vendor != "postgresql" or not hasattr(connection_class, "notifies"):
            raise Unsupported(
                "expected PostgreSQL with psycopg 3 for every processor with --listen, got "
                f"{wrapper.settings_dict['ENGINE']!r} as {using!r}; leave --listen out, and poll."
            )
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
        self._wrapper = connections[self.using].copy()
        # Without the pool, which expects its connections back.
        self._wrapper.settings_dict["OPTIONS"].pop("pool", None)
        with self._wrapper.cursor() as cursor:
            for channel in self.names:
                quoted = channel.replace('"', '""')
                cursor.execute(f'LISTEN "{quoted}"')
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
            described(error),
        )
        return set(self.names.values())
