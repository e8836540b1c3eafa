"""Find and end a transaction that a handler leaves open, before rows are settled inside it.

Later claims and settlements would look committed, and be lost if that transaction is rolled back.
Django and the driver know whether one is open. MariaDB's driver does not know, so there the server
is asked, but only when a statement went through Django's cursors that can begin a transaction.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Self

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections, transaction
from django.db.backends.signals import connection_created

from dcl_processor.database.driver import asked_in_transaction, in_transaction, roll_back
from dcl_processor.exceptions import TransactionLeftOpen
from dcl_processor.locking.isolation import from_test_case

from .handler import Failed, Handled, Outcome

# Looked for at the beginning of a statement, because large values come later.
_BEGINS = re.compile(
    r"\b(begin|start|xa|autocommit|chain|completion_type|call|execute|immediate)\b", re.IGNORECASE
)
_LOOKED_AT = 500  # characters


class Leftover:
    """Watches one handler, and ends the transaction that it leaves open.

    ``is_marked``: whether the row is marked, so that the only transaction around the handler is
    that of Django's ``TestCase``.
    """

    def __init__(self, using: str, *, is_marked: bool = False) -> None:
        self._connection: Any = connections[using]
        self._is_in_test = is_marked and self._connection.in_atomic_block
        #: Whether it has to look at what a handler sends; elsewhere the driver knows afterwards.
        self.watches = self._connection.vendor == "mysql" or self._is_in_test
        self._may_have_begun = False

    def __enter__(self) -> Self:
        connection = self._connection
        if connection.vendor == "mysql":
            connection.execute_wrappers.append(self._notice)
        if self._is_in_test:
            self._savepoint("savepoint_create_sql")
        return self

    def unwatch(self) -> None:
        """Look at no further statement; also where an interrupt came before the handler."""
        wrappers = self._connection.execute_wrappers
        wrappers[:] = [each for each in wrappers if each != self._notice]

    def __exit__(self, *raised: object) -> None:
        self.unwatch()
        if self._is_in_test:
            try:
                self._savepoint("savepoint_commit_sql")
            except DatabaseError:
                # An error in the handler has broken the test's transaction.
                transaction.set_rollback(False, using=self._connection.alias)
                self._savepoint("savepoint_rollback_sql", "savepoint_commit_sql")

    def _savepoint(self, *kinds: str) -> None:
        with self._connection.cursor() as cursor:
            for kind in kinds:
                cursor.execute(getattr(self._connection.ops, kind)("dcl_test"))

    def judge(self, outcome: Any) -> Any:
        """End the transaction that was left open; return the outcome of the call, of its kind."""
        if not self.end():
            return outcome
        if isinstance(outcome, dict):
            return {pk: without_work(each) for pk, each in outcome.items()}
        return without_work(outcome)

    def end(self) -> bool:
        """Roll back the open transaction, if there is one; return whether there was."""
        connection = self._connection
        if not self.may_be_left():
            return False
        is_left = self._is_open() and not any(map(from_test_case, connection.atomic_blocks[:1]))
        if is_left:
            roll_back(connection)
            self._may_have_begun = False
        return is_left

    @property
    def connection(self) -> Any:
        """The connection that is watched."""
        return self._connection

    def may_be_left(self) -> bool:
        """Return whether a transaction may be open; sends nothing."""
        connection = self._connection
        driver = connection.connection
        if driver is None or getattr(driver, "closed", False):
            return False
        if connection.in_atomic_block or not connection.autocommit:
            return True
        known = in_transaction(connection)
        return self._may_have_begun if known is None else known

    def _is_open(self) -> bool:
        """Return whether a transaction is open; asks the server if only that knows it."""
        connection = self._connection
        if connection.in_atomic_block or not connection.autocommit:
            return True
        known = in_transaction(connection)
        if known is None and self._may_have_begun:
            self._may_have_begun = asked_in_transaction(connection)
        return self._may_have_begun if known is None else known

    def _notice(self, execute: Callable[..., Any], sql: str, *arguments: Any) -> Any:
        start = str(sql)[:_LOOKED_AT]
        if _BEGINS.search(start):
            self._may_have_begun = True
        return execute(sql, *arguments)


# --- the connections that the handlers of one event loop share
#
# Asynchronous handlers use the database in one thread, which has a connection for each alias. A
# transaction that one of them begins there and does not end contains the work of the others, too,
# and all of it is rolled back when the run ends.


#: Seconds that the handlers' thread has to become free in. A handler that hangs there has it.
WITHIN = 10.0

#: The sessions of the event loop that the code belongs to, also in the thread for the database.
_now: ContextVar[SharedSessions | None] = ContextVar("_now", default=None)


class SharedSessions:
    """Watches the connections that handlers open, and ends the transactions left open on them.

    Without a connection it costs nothing, and with one a look at what the driver knows.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, Leftover]] = []
        #: Calls that lose their work by the end of a transaction.
        self._lost: set[Any] = set()
        self._ending = asyncio.Lock()

    def watch(self) -> None:
        """Begin to notice new connections, in the context of the caller."""
        _now.set(self)
        connection_created.connect(_note)

    def note(self, connection: Any) -> None:
        """Watch a new connection, in whose thread this is called."""
        if all(each.connection is not connection for _, each in self._found):
            leftover = Leftover(connection.alias)
            leftover.__enter__()
            self._found.append((threading.get_ident(), leftover))

    async def renew(self) -> None:
        """Close sessions that were lost, or each later handler would fail on them."""
        if any(leftover.connection.errors_occurred for _, leftover in self._found):
            await sync_to_async(close_lost)()

    async def were_left_open(self, pk: Any, under_way: Collection[Any]) -> bool:
        """Return whether the work of a call that has ended is lost in an open transaction.

        ``pk``: names the call, which is one of those that are ``under_way``. It is not known which
        of these has begun the transaction, nor which of them worked in it.
        """
        # Race: flip without work. While one call ends a transaction, the others wait until it has
        # noted them: they would find no transaction any more.
        async with self._ending:
            if self._may_be_left():
                await self._end(under_way)
        is_lost = pk in self._lost
        self._lost.discard(pk)
        return is_lost

    def _may_be_left(self) -> bool:
        return any(leftover.may_be_left() for _, leftover in self._found)

    async def _end(self, under_way: Collection[Any]) -> None:
        """End what is open, in the handlers' thread, between what it does for others."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN):
                await sync_to_async(self._end_here)(under_way)

    def _end_here(self, under_way: Collection[Any]) -> None:
        # A connection of another thread is used by a handler that has asked for such a thread.
        here = threading.get_ident()
        self._found = [(thread, leftover) for thread, leftover in self._found if thread == here]
        ended = [leftover.end() for _, leftover in self._found]  # each of them
        if any(ended):
            self._lost.update([*under_way])


def close_lost(but: str | None = None) -> None:
    """Close this thread's sessions that were lost, except that of one alias."""
    for each in connections.all(initialized_only=True):
        if each.alias == but or not each.errors_occurred or each.in_atomic_block:
            continue
        # Not close_if_unusable_or_obsolete(): the caller may have a transaction open there.
        is_closed = getattr(each.connection, "closed", each.connection is None)
        if is_closed or not (in_transaction(each) or each.is_usable()):
            each.close()


def without_work(outcome: Outcome, *, shared: bool = False) -> Outcome:
    """Return the outcome of a call whose work was rolled back; ``shared``: with that of others."""
    if not isinstance(outcome, Handled):
        return outcome
    error = TransactionLeftOpen(shared=shared)
    return Failed(error, handled=True, duration=outcome.duration)


def _note(connection: Any, **_: Any) -> None:
    sessions = _now.get()
    if sessions is not None:
        sessions.note(connection)
