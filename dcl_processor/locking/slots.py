"""The slots of a processor with ``max_workers``: a worker is at work only while it holds one.

A slot is a lock that belongs to a session of its own. The server releases it when that session
ends, so that a worker that dies frees its slot with no timer. On PostgreSQL the lock belongs to an
open transaction of that session. A lock of the session itself would be wrong behind PgBouncer in
transaction mode, where several clients share one session and each of them would get the same slot.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from django.db import Error, connections

from dcl_processor import steady as time
from dcl_processor.database.connection import has_news
from dcl_processor.exceptions import Unsupported

#: Seconds between two questions to the server whether the slot is still held. In between, a
#: session that the server has ended is noticed without a question.
ASK_EVERY = 2.0

#: Seconds of a session without a statement, on MariaDB and MySQL: the most that every platform has.
LONGEST_SESSION = 2_147_483


class TransactionLocks:
    """PostgreSQL: an advisory lock of an open transaction.

    Each method but ``take()`` raises if the session has ended.
    """

    def __init__(self, label: str) -> None:
        self._label = label

    def take(self, connection: Any, slots: Sequence[int]) -> int | None:
        """Take the first free one of these slots; return it, or ``None`` if all are taken."""
        numbers = {_number(self._label, slot): slot for slot in slots}
        with connection.cursor() as cursor:
            cursor.execute(_begin(connection))
            # A scan of a function's rows calls the lock function row by row, and ends at the first
            # lock. Without parameters, and from a client-side cursor, it is a simple query: the
            # open portal of an extended one would keep its snapshot, and hold VACUUM back.
            cursor.execute(
                f"SELECT number FROM unnest('{{{','.join(map(str, numbers))}}}'::bigint[]) number "  # noqa: S608  # own numbers
                "WHERE pg_try_advisory_xact_lock(number) LIMIT 1"
            )
            taken = cursor.fetchone()
            if taken is None:
                # A worker that waits keeps no server connection of a pooler.
                cursor.execute("ROLLBACK")
                return None
        return numbers[taken[0]]

    def holds(self, connection: Any, slot: int) -> bool:  # noqa: ARG002  # as in SessionLocks
        """Return whether the session still holds the slot."""
        # The lock ends with the transaction, and the transaction only with the session.
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        return True

    def free(self, connection: Any, slot: int) -> None:  # noqa: ARG002  # as above
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK")


class SessionLocks:
    """MariaDB and MySQL: a lock by name, which belongs to the session."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._database = ""

    def take(self, connection: Any, slots: Sequence[int]) -> int | None:
        with connection.cursor() as cursor:
            self._prepare(connection, cursor)
            for slot in slots:
                cursor.execute("SELECT GET_LOCK(%s, 0)", [self._name(slot)])
                if cursor.fetchone()[0] == 1:
                    return slot
        return None

    def _prepare(self, connection: Any, cursor: Any) -> None:
        cursor.execute("SHOW GLOBAL VARIABLES LIKE 'wsrep_on'")
        refuse_cluster(dict(cursor.fetchall()), connection.alias, self._label)
        cursor.execute(f"SET SESSION wait_timeout = {LONGEST_SESSION}")
        # The names of locks are the server's, and not the database's.
        cursor.execute("SELECT DATABASE()")
        self._database = cursor.fetchone()[0]

    def holds(self, connection: Any, slot: int) -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT IS_USED_LOCK(%s) = CONNECTION_ID()", [self._name(slot)])
            return bool(cursor.fetchone()[0])

    def free(self, connection: Any, slot: int) -> None:
        with connection.cursor() as cursor:
            cursor.execute("DO RELEASE_LOCK(%s)", [self._name(slot)])

    def _name(self, slot: int) -> str:
        # Servers compare names without case, and accept at most 64 characters.
        return _digest(f"{self._database}\0{self._label}", slot, size=16).hex()


#: The locks of each database that has some, by Django's name for it.
LOCKS: dict[str, type[TransactionLocks | SessionLocks]] = {
    "postgresql": TransactionLocks,
    "mysql": SessionLocks,
}


def refuse_without_locks(using: str, label: str) -> None:
    """Raise ``Unsupported`` unless the database has locks that end with a session."""
    connection = connections[using]
    if connection.vendor not in LOCKS:
        raise Unsupported(
            f"{label}: expected max_workers on PostgreSQL, MariaDB or MySQL, whose locks end with "
            f"a session, got {using!r}, which is {connection.display_name}; leave max_workers out."
        )


def refuse_cluster(variables: dict[str, str], using: str, label: str) -> None:
    """Raise ``Unsupported`` on a Galera cluster, where each node has locks of its own."""
    if variables.get("wsrep_on") == "ON":
        raise Unsupported(
            f"{label}: expected max_workers on a server without Galera, got wsrep_on=ON on "
            f"{using!r}, where GET_LOCK() counts on one node only; leave max_workers out."
        )


class Slot:
    """One worker's slot, on a connection of its own; the threads of its run share it.

    ``most``: the processor's ``max_workers``. All workers of a processor have to use the same name
    and database, because these two are what a slot is known by.
    """

    def __init__(self, using: str, label: str, most: int) -> None:
        refuse_without_locks(using, label)
        self._using = using
        self._most = most
        self._locks = LOCKS[connections[using].vendor](label)
        self._lock = threading.Lock()
        self._connection: Any = None
        self._slot: int | None = None
        self._ask_at = 0.0

    def take(self) -> bool:
        """Take a free slot unless this worker has one; return whether it has one then.

        Raises a database error if no slot can be asked for.
        """
        with self._lock:
            if self._slot is None:
                try:
                    self._take()
                except Error:
                    # The session may have ended since the last try, by a timeout of the server.
                    self._close()
                    self._take()
            return self._slot is not None

    def _take(self) -> None:
        if self._connection is None:
            self._connection = _connect(self._using)
        # Each worker asks in an order of its own, or all would ask for the first slot first.
        slots = random.sample(range(self._most), self._most)
        self._slot = self._locks.take(self._connection, slots)
        self._ask_at = time.monotonic() + ASK_EVERY

    def is_held(self) -> bool:
        """Return whether the slot is still this worker's; once it is lost, it has to be taken."""
        with self._lock:
            if self._slot is None:
                return False
            # Race: worker over the cap. The loss of a slot is seen only when asked; another worker
            # may have it: this one starts no further row.
            if time.monotonic() >= self._ask_at or has_news(self._connection.connection):
                self._ask(self._slot)
            return self._slot is not None

    def _ask(self, slot: int) -> None:
        try:
            if self._locks.holds(self._connection, slot):
                self._ask_at = time.monotonic() + ASK_EVERY
                return
        except Error:
            pass  # the session has ended, and the lock with it
        self._close()

    def release(self) -> None:
        """Free the slot, and close its connection."""
        with self._lock:
            try:
                if self._slot is not None:
                    # The server notices a closed connection a moment later, and by then the next
                    # run may have asked for the slot.
                    with suppress(Error):
                        self._locks.free(self._connection, self._slot)
            finally:
                self._close()

    def _close(self) -> None:
        connection, self._connection, self._slot = self._connection, None, None
        if connection is not None:
            with suppress(Error):
                connection.close()


def _connect(using: str) -> Any:
    """Return a new connection to the alias's database, beside Django's own and its pool."""
    model = connections[using]
    own = {"pool", "prepare_threshold", "server_side_binding"}
    options = {
        name: value for name, value in model.settings_dict["OPTIONS"].items() if name not in own
    }
    connection: Any = type(model)({**model.settings_dict, "OPTIONS": options}, using)
    connection.inc_thread_sharing()
    connection.ensure_connection()
    return connection


def _begin(connection: Any) -> str:
    """Return the statements that open a transaction without a snapshot and without an end."""
    # At a higher level, the first statement's snapshot would last, and hold VACUUM back.
    begin = (
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL idle_in_transaction_session_timeout = 0"
    )
    if connection.pg_version >= 170000:
        begin += "; SET LOCAL transaction_timeout = 0"
    return begin


def _number(label: str, slot: int) -> int:
    return int.from_bytes(_digest(label, slot, size=8), "big", signed=True)


def _digest(label: str, slot: int, *, size: int) -> bytes:
    return blake2b(f"dcl_processor\0workers\0{label}\0{slot}".encode(), digest_size=size).digest()
