"""One thread of a process that reads and writes the ledger's tables.

It has a connection of its own, as Django gives one to each thread, so that nothing of the ledger
is ever part of a handler's transaction. A database that does not answer keeps this thread waiting,
and a run only for a bounded time: after that, the run goes on without the ledger for a while, which
grows. A thread that waits for much longer has a dead connection, and a new thread takes its place.
Inside ``TestCase`` the test's own connection is used instead, because another one would not see the
test's rows, and would leave rows behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from django.db import connections

from dcl_processor import steady as time
from dcl_processor.errors import printable
from dcl_processor.locking.isolation import from_test_case
from dcl_processor.masking import described

from .tables import alias

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

#: Seconds without a question after a late answer, or none: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 60.0

#: Seconds after those of the patience after which a thread without an answer is replaced, and the
#: most threads that were replaced and have not ended: each of them may have a connection.
DEAD_AFTER, MOST_REPLACED = 30.0, 2

#: Seconds between two looks at whether the thread is to be replaced.
LOOK_EVERY = 5.0

#: Seconds between two warnings that the ledger cannot be used.
WARN_EVERY = 300.0


class UnreachableError(Exception):
    """The ledger could not be read or written."""


class _Line(threading.Thread):
    """One thread, and since when it has been busy."""

    def __init__(self, serve: Callable[[_Line], None]) -> None:
        super().__init__(target=serve, args=[self], name="dcl_processor: ledger", daemon=True)
        #: When it began with a job, a tick or a statement; ``None``: it waits.
        self.busy_since: float | None = None
        #: Whether it is to end.
        self.is_over = False

    @property
    def busy_for(self) -> float:
        since = self.busy_since
        return 0.0 if since is None else time.monotonic() - since


class Desk:
    """The thread, which is started when it is needed; ``tick``: called by it each ``POLL``.

    ``tick`` returns whether the thread is needed any longer.
    """

    def __init__(self, tick: Callable[[], bool], patience: float = PATIENCE) -> None:
        self._tick = tick
        self._patience = patience
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        #: The thread, if there is one.
        self._line: _Line | None = None
        #: Those that were replaced, as long as they have not ended.
        self._replaced: list[_Line] = []
        self._warned = -WARN_EVERY
        self._next_try = 0.0
        self._pause = 0.0

    def call(self, do: Callable[[], T], *, within: float | None = None) -> T:
        """Do something with the tables, and return the result; raise ``UnreachableError``.

        ``within``: seconds to wait, also during the pause after a question without an answer.
        """
        asked, inline = time.monotonic(), is_inline()
        if not inline and within is None and self._is_silent():
            raise self._unreachable("no answer, and it is not asked again yet")
        try:
            result = do() if inline else self._by_thread(do, within)
        except UnreachableError:
            raise
        except Exception as error:
            if time.monotonic() - asked >= LATE:
                self._pause_longer()
            raise self._unreachable(described(error)) from error
        self._answered()
        return result

    def _by_thread(self, do: Callable[[], T], within: float | None) -> T:
        answer = self._post(do)
        patience = self._patience if within is None else within
        if not wait([answer], patience).done:
            answer.cancel()  # put later, its question would be out of date
            self._pause_longer()
            raise self._unreachable(f"no answer within {patience:.3g} s")
        return answer.result()

    def _is_silent(self) -> bool:
        """Return whether a question would only wait: a run asks for each row that fails."""
        line = self._line
        is_stuck = line is not None and line.busy_for >= self._patience
        return is_stuck or time.monotonic() < self._next_try

    def _pause_longer(self) -> None:
        if time.monotonic() < self._next_try:
            return  # another thread has found the same
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._next_try = time.monotonic() + self._pause

    def _answered(self) -> None:
        self._next_try = self._pause = 0.0

    def _post(self, do: Callable[[], T]) -> Future[T]:
        answer = Future[T]()
        with self._lock:
            self._jobs.put((answer, do))
            if self._line is None:
                self._start()
            else:
                self._line.is_over = False  # it may have been asked to end before this job
        return answer

    def _start(self) -> None:
        """Start a thread, which does the jobs before its first tick; the caller has the lock."""
        line = self._line = _Line(self._serve)
        line.start()
        guard = threading.Thread(target=self._look_after, args=[line], daemon=True)
        guard.name = "dcl_processor: guard of the ledger"
        guard.start()

    def _look_after(self, line: _Line) -> None:
        while line is self._line and line.is_alive():
            line.join(LOOK_EVERY)
            self.relieve()

    def relieve(self) -> None:
        """Let a new thread take over from one that has waited for an answer for too long.

        Nothing in this process can end the wait for an answer of a dead connection.
        """
        with self._lock:
            line = self._line
            if line is None or line.busy_for < self._patience + DEAD_AFTER:
                return
            self._replaced = [each for each in self._replaced if each.is_alive()]
            if len(self._replaced) < MOST_REPLACED:
                self._replaced.append(line)
                self._start()

    def close(self) -> None:
        """Do what is left, and end the thread."""
        with self._lock:
            line = self._line
            if line is None:
                return
            line.is_over = True
            self._jobs.put((Future(), lambda: None))  # wakes it
            patience = self._patience - line.busy_for
        line.join(max(0.0, patience))

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

    def _serve(self, line: _Line) -> None:
        tick_at = idle_since = time.monotonic()
        try:
            with connections[alias()].execute_wrapper(partial(self._execute, line)):
                while not self._ends(line, time.monotonic() - idle_since >= IDLE):
                    line.busy_since = None
                    with suppress(Empty):
                        job = self._jobs.get(timeout=max(0.0, tick_at - time.monotonic()))
                        line.busy_since = time.monotonic()
                        _do(*job)
                    now = time.monotonic()
                    if now >= tick_at and line is self._line:
                        tick_at, line.busy_since = now + POLL, now
                        if self._ticks(line):
                            idle_since = now
        finally:
            with self._lock:
                if line is self._line:  # an error ends the thread, and a new one may be started
                    self._line = None
            with suppress(Exception):
                connections.close_all()

    def _execute(self, line: _Line, execute: Callable[..., Any], *statement: Any) -> Any:
        # Race: late answer. The new thread has read and written since. A statement of the replaced
        # thread would overwrite newer data.
        if line is not self._line:
            raise UnreachableError("another thread has taken over")
        line.busy_since = time.monotonic()
        return execute(*statement)

    def _ticks(self, line: _Line) -> bool:
        is_needed, why = True, ""
        try:
            is_needed = self._tick()
        except Exception as error:  # noqa: BLE001  # the next one may work
            why = described(error)
            close()
        if line is not self._line:
            return False  # it says nothing of the connection of the new thread
        if why:
            self.warn(why)
        elif is_needed:
            self._answered()  # perhaps before the pause is over
        return is_needed

    def _ends(self, line: _Line, is_idle: bool) -> bool:
        with self._lock:
            if line is self._line:
                if not (self._jobs.empty() and (is_idle or line.is_over)):
                    return False
                self._line = None
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
