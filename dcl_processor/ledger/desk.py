"""One thread of a process that reads and writes the ledger's tables.

It has a connection of its own, as Django gives one to each thread, so that nothing of the ledger
is ever part of a handler's transaction. A database that does not answer keeps this thread waiting,
and a run only for a bounded time: after that, the run goes on without the ledger for a while.
Inside ``TestCase`` the test's own connection is used instead, because another one would not see the
test's rows, and would leave rows behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from django.db import connections

from dcl_processor.pending import steady as time
from dcl_processor.report.errors import described, printable
from dcl_processor.sql.isolation import from_test_case

from .models import alias

T = TypeVar("T")

logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two reads of the orders while a run or a watch is at work.
POLL = 1.0

#: Seconds that a run waits for an answer of the ledger.
PATIENCE = 5.0

#: Seconds after which a thread without work ends, and closes its connection. PostgreSQL waits 5
#: seconds for the sessions of a database that it is to drop, such as that of tests.
IDLE = 1.0

#: Seconds after which an error comes late, as does that of a host that cannot be reached.
LATE = 0.5

#: Seconds without a question after a late answer, or none.
PAUSE = 30.0

#: Seconds between two warnings that the ledger cannot be used.
WARN_EVERY = 300.0


class UnreachableError(Exception):
    """The ledger could not be read or written."""


class Desk:
    """The thread, which is started when it is needed; ``tick``: called by it each ``POLL``.

    ``tick`` returns whether the thread is needed any longer.
    """

    def __init__(self, tick: Callable[[], bool], patience: float = PATIENCE) -> None:
        self._tick = tick
        self._patience = patience
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        #: The thread, if there is one, and whether it is to end.
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._warned = -WARN_EVERY
        self._next_try = 0.0

    def call(self, do: Callable[[], T]) -> T:
        """Do something with the tables, and return the result; raise ``UnreachableError``."""
        asked, inline = time.monotonic(), is_inline()
        if not inline and self._is_silent():
            raise self._unreachable("no answer, and it is not asked again yet")
        try:
            return do() if inline else self._by_thread(do)
        except UnreachableError:
            raise
        except Exception as error:
            if time.monotonic() - asked >= LATE:
                self._be_silent()
            raise self._unreachable(described(error)) from error

    def _by_thread(self, do: Callable[[], T]) -> T:
        answer = self._post(do)
        if not wait([answer], self._patience).done:
            answer.cancel()  # put later, its question would be out of date
            self._be_silent()
            raise self._unreachable(f"no answer within {self._patience:.3g} s")
        return answer.result()

    def _is_silent(self) -> bool:
        """Return whether a question would only wait."""
        return time.monotonic() < self._next_try

    def _be_silent(self) -> None:
        self._next_try = time.monotonic() + PAUSE

    def _post(self, do: Callable[[], T]) -> Future[T]:
        answer = Future[T]()
        with self._lock:
            self._jobs.put((answer, do))
            self._is_over = False  # it may have been asked to end before this job
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="dcl_processor: ledger", daemon=True
                )
                self._thread.start()
        return answer

    def close(self) -> None:
        """Do what is left, and end the thread."""
        with self._lock:
            thread = self._thread
            if thread is None:
                return
            self._is_over = True
            self._jobs.put((Future(), lambda: None))  # wakes it
        thread.join(0.0 if self._is_silent() else self._patience)

    def warn(self, why: str) -> None:
        """Log that the ledger cannot be used, now and then."""
        now = time.monotonic()
        if now - self._warned >= WARN_EVERY:
            self._warned = now
            logger.warning(
                "the ledger cannot be used, and its last known state holds: %s", printable(why)
            )

    def _unreachable(self, why: str) -> UnreachableError:
        self.warn(why)
        return UnreachableError(why)

    def _serve(self) -> None:
        tick_at = idle_since = time.monotonic()
        try:
            while not self._ends(time.monotonic() - idle_since >= IDLE):
                with suppress(Empty):
                    _do(*self._jobs.get(timeout=max(0.0, tick_at - time.monotonic())))
                now = time.monotonic()
                if now >= tick_at:
                    tick_at = now + POLL
                    if self._is_needed():
                        idle_since = now
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # an error ends it
                    self._thread = None
            with suppress(Exception):
                connections.close_all()

    def _is_needed(self) -> bool:
        try:
            is_needed = self._tick()
        except Exception as error:  # noqa: BLE001  # the next one may work
            self.warn(described(error))
            close()
            return True
        if is_needed:
            self._next_try = 0.0  # it has an answer, perhaps before the pause is over
        return is_needed

    def _ends(self, is_idle: bool) -> bool:
        with self._lock:
            if not (self._jobs.empty() and (is_idle or self._is_over)):
                return False
            self._thread = None
        return True


def _do(answer: Future[Any], do: Callable[[], Any]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(do())
    except Exception as error:  # noqa: BLE001  # for the thread that waits
        answer.set_exception(error)
        close()


def is_inline() -> bool:
    """Return whether the ledger is to use the caller's own connection: that of a ``TestCase``."""
    connection: Any = connections[alias()]
    if any(map(from_test_case, connection.atomic_blocks[:1])):
        return True
    in_memory = getattr(connection, "is_in_memory_db", None)
    return in_memory is not None and bool(in_memory())


def close() -> None:
    """Close this thread's connection after an error; the next statement opens a new one."""
    connection = connections[alias()]
    if not connection.in_atomic_block:
        # Whatever it raises, the thread goes on.
        with suppress(Exception):
            connection.close_if_unusable_or_obsolete()
