"""Wakes the watchers of a processor by PostgreSQL's NOTIFY.

A notification is a hint and carries no row: a watcher that receives one reads the pending rows, as
after any other wait. A lost notification costs a watcher the rest of its interval, nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

from django.db import Error, connections, transaction

from dcl_processor.options.options import Definition
from dcl_processor.pending.question import ask
from dcl_processor.report.errors import described

logger = logging.getLogger("dcl_processor")

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
