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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

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

#: Seconds after those of the patience after which a thread without an answer is replaced; seconds
#: between two replacements, and the most threads that were replaced and have not ended.
DEAD_AFTER, REPLACE_EVERY, MOST_REPLACED = 30.0, 60.0, 2

#: Seconds between two looks at whether the thread is to be replaced.
LOOK_EVERY = 5.0

#: Seconds between two warnings that the ledger cannot be used.
WARN_EVERY = 300.0


class UnreachableError(Exception):
    """The ledger could not be read or written."""


@dataclass(slots=True)
class _Job(Generic[T]):
    do: Callable[[], T]
    is_done: threading.Event = field(default_factory=threading.Event)
    result: T | None = None
    error: Exception | None = None
    #: Whether no thread waits for it any longer; its question would be out of date.
    is_abandoned: bool = False

    def __call__(self) -> None:
        try:
            if not self.is_abandoned:
                self.result = self.do()
        except Exception as error:  # noqa: BLE001  # for the thread that waits
            self.error = error
        finally:
            self.is_done.set()


@dataclass(slots=True, eq=False)
class _Line:
    """What one thread is to do, and since when it has been busy."""

    jobs: SimpleQueue[_Job[Any]] = field(default_factory=SimpleQueue)
    #: When it began with a job, a tick or a statement, by the monotonic clock; ``None``: it waits.
    busy_since: float | None = None
    #: Whether the thread is to end.
    is_over: bool = False
    has_ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.busy_since = time.monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def left(self) -> Iterator[_Job[Any]]:
        """Take the jobs that the thread has not begun."""
        with suppress(Empty):
            while True:
                yield self.jobs.get_nowait()

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
        #: That of the thread, if there is one.
        self._line: _Line | None = None
        #: Those of threads that were replaced, as long as they have not ended.
        self._replaced: list[_Line] = []
        self._replaced_at = -REPLACE_EVERY
        self._warned = -WARN_EVERY
        #: The job whose answer has not come. While it waits, further jobs fail at once.
        self._stuck: _Job[Any] | None = None
        self._next_try = 0.0
        self._pause = 0.0

    def call(self, do: Callable[[], T], *, within: float | None = None) -> T:
        """Do something with the tables, and return the result; raise ``UnreachableError``.

        ``within``: seconds to wait, also during the pause after a question without an answer.
        """
        inline = is_inline()
        if not inline and within is None and self._is_silent():
            raise self._unreachable("no answer, and it is not asked again yet")
        asked = time.monotonic()
        job = self._post(do, inline)
        patience = self._patience if within is None else within
        if not job.is_done.wait(patience):
            job.is_abandoned = True
            self._stuck = job
            self._pause_longer()
            raise self._unreachable(f"no answer within {patience:.3g} s")
        if job.error is not None:
            if time.monotonic() - asked >= LATE:
                self._pause_longer()
            raise self._unreachable(described(job.error)) from job.error
        self._answered()
        return job.result  # type: ignore[return-value]  # set by the job

    def _is_silent(self) -> bool:
        """Return whether a question would only wait: a run asks for each row that fails."""
        stuck = self._stuck
        return time.monotonic() < self._next_try or (
            stuck is not None and not stuck.is_done.is_set()
        )

    def _pause_longer(self) -> None:
        if time.monotonic() < self._next_try:
            return  # another thread has found the same
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or FIRST_PAUSE)
        self._next_try = time.monotonic() + self._pause

    def _answered(self) -> None:
        self._stuck = None
        self._next_try = self._pause = 0.0

    def _post(self, do: Callable[[], T], inline: bool) -> _Job[T]:
        job = _Job(do)
        if inline:
            job()
            return job
        with self._lock:
            if self._line is None:
                self._start([job])
            else:
                self._line.jobs.put(job)
                self._line.is_over = False  # it may have been asked to end before this job
        return job

    def _start(self, jobs: Iterable[_Job[Any]]) -> None:
        """Start a thread, whose first tick comes after these jobs; the caller has the lock."""
        line = self._line = _Line()
        for job in jobs:
            line.jobs.put(job)
        for act, name in ((self._serve, "ledger"), (self._look_after, "guard of the ledger")):
            threading.Thread(
                target=act, args=[line], name=f"dcl_processor: {name}", daemon=True
            ).start()

    def _look_after(self, line: _Line) -> None:
        # Nothing in this process can end the wait for an answer of a dead connection.
        while line is self._line and not line.has_ended.wait(LOOK_EVERY):
            self.relieve()

    def relieve(self) -> None:
        """Let a new thread take over from one that has waited for an answer for too long."""
        with self._lock:
            line, now = self._line, time.monotonic()
            self._replaced = [each for each in self._replaced if not each.has_ended.is_set()]
            if line is None or line.busy_for < self._patience + DEAD_AFTER:
                return
            if now - self._replaced_at < REPLACE_EVERY or len(self._replaced) >= MOST_REPLACED:
                return  # each of them may have a connection
            self._replaced.append(line)
            self._replaced_at = now
            self._stuck = None
            self._start(line.left())

    def close(self) -> None:
        """Do what is left, and end the thread."""
        with self._lock:
            line, stuck = self._line, self._stuck
            if line is None:
                return
            line.is_over = True
            is_stuck = stuck is not None and not stuck.is_done.is_set()
            if not is_stuck:
                line.jobs.put(_Job(lambda: None))
        if not is_stuck:
            line.has_ended.wait(self._patience)

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
                while True:
                    with suppress(Empty):
                        job = line.jobs.get(timeout=max(0.0, tick_at - time.monotonic()))
                        with line.busy():
                            job()
                            if job.error is not None:
                                close()
                    now = time.monotonic()
                    if now >= tick_at and line is self._line:
                        tick_at = now + POLL
                        with line.busy():
                            if self._ticks(line):
                                idle_since = now
                    if self._ends(line, now - idle_since >= IDLE):
                        break
        finally:
            with self._lock:
                if line is self._line:  # an error ends the thread, and a new one may be started
                    self._line = None
            with suppress(Exception):
                connections.close_all()
            line.has_ended.set()

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
                if not (line.jobs.empty() and (is_idle or line.is_over)):
                    return False
                self._line = None
        return True


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
