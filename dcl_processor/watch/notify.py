"""Wakes the watchers of a processor: PostgreSQL's NOTIFY, once for a burst.

A notification is a hint and carries no row: a watcher that receives one reads the pending rows, as
after any other wait. A lost notification costs a watcher the rest of its interval, nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from dcl_processor import steady as time
from dcl_processor.candidates.question import ask
from dcl_processor.masking import described

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

logger = logging.getLogger("dcl_processor")

#: Seconds in which a process notifies once. A watcher that was woken looks again after this time,
#: so that no thread has to send the last notification of a burst.
BURST = 0.01

# PostgreSQL's NAMEDATALEN, less the final zero: bytes.
_LONGEST_CHANNEL = 63

# When this process last notified, by alias and channel. Two threads may both find the time over,
# and notify twice, which does no harm.
_notified: dict[tuple[str, str], float] = {}


# The channels that a transaction is to notify. Django drops the callbacks of what is rolled back,
# without a signal. So each call registers a callback, and the first one that runs leaves nothing
# for the others.
_asked: WeakKeyDictionary[BaseDatabaseWrapper, set[str]] = WeakKeyDictionary()


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
    if connections[using].vendor != "postgresql":  # which alone has LISTEN and NOTIFY
        return
    if not connection.in_atomic_block:
        _notify(using, channel(processor.name))
        return
    # Not inside the transaction: PostgreSQL commits transactions with a NOTIFY one at a time.
    asked = _asked.setdefault(connection, set())
    asked.add(channel(processor.name))
    last = partial(_after_commit, using, channel(processor.name), asked)
    transaction.on_commit(last, using=using)


def _after_commit(using: str, channel: str, asked: set[str]) -> None:
    if channel in asked:
        asked.remove(channel)
        _notify(using, channel)


def _notify(using: str, channel: str) -> None:
    now = time.monotonic()
    if now - _notified.get((using, channel), -BURST) < BURST:
        return
    _notified[using, channel] = now
    try:
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '')", [channel])
    except Error as error:
        # The rows are committed, and will be found, so the caller need not fail.
        _notified.pop((using, channel), None)
        logger.warning("the watchers on %r were not notified: %s", channel, described(error))
