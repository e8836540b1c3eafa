"""Interrupt a plain handler whose time is over.

A thread of the run raises ``HandlerCancelled`` in the main thread, where the handler is: CPython
delivers it between two steps of Python code, so not while the thread waits in C. A signal ends such
a wait, and reaches the main thread alone. Whatever the handler makes of it, its row has failed, and
the sessions of the thread are closed: where it was interrupted, they may be in the middle of a
statement.

Asynchronous handlers need none of this: asyncio cancels them.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from django.db import connections

from dcl_processor import steady as time
from dcl_processor.database.driver import cancel, is_busy, roll_back
from dcl_processor.exceptions import HandlerTimeout
from dcl_processor.interrupts import HandlerCancelled, ends_the_run
from dcl_processor.locking.isolation import from_test_case

from .calls import GRACE, Call

T = TypeVar("T")

#: A signal that programs ignore unless they ask for it, so that one that comes late does no harm.
#: Go's runtime uses it for the same reason. Windows has none.
WAKES: int | None = getattr(signal, "SIGURG", None)


class _Watched:
    """A call that is interrupted when it is due.

    Two threads use it without a lock, because an interrupt could leave a lock held. The order of
    the assignments replaces the lock: the handler's thread writes ``is_over`` and then waits until
    nothing ``is_sending``; the other one writes ``is_sending`` and then reads ``is_over``.
    """

    __slots__ = ("due", "is_over", "is_sending", "thread", "was_sent")

    def __init__(self, due: float) -> None:
        self.due = due
        self.thread = threading.get_ident()
        self.is_over = self.is_sending = self.was_sent = False

    def interrupt(self) -> None:
        """Raise ``HandlerCancelled`` in the thread of the call, unless it is over."""
        self.is_sending = True
        try:
            if not self.is_over:
                self.was_sent = True
                _raise_in(self.thread, HandlerCancelled)
        finally:
            self.is_sending = False
        _wake_main_thread(self.thread)

    def end(self) -> None:
        """End the call, so that nothing is raised in its thread from here on; may be repeated."""
        self.is_over = True
        # What was sent meanwhile is raised here: CPython looks for it when a call returns.
        while self.is_sending:
            time.sleep(0)


class TimeLimit:
    """The limit of one run's handlers, in seconds."""

    def __init__(self, seconds: float, label: str) -> None:
        self.seconds = seconds
        self._label = label
        self._watched: _Watched | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._replaced: Any = None

    def keep(self, call: Call, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function, and interrupt it at the limit; raise ``HandlerTimeout`` then."""
        self._start()
        sessions = Sessions()
        watched = _Watched(call.since + self.seconds)
        result: Any = None
        error: BaseException | None = None
        # The interrupt may come at any step until end() has returned, also in an ``except``.
        try:
            try:
                self._watched = watched
                result = function(*arguments)
            except BaseException as raised:  # noqa: BLE001  # raised again below
                error = raised
            watched.end()
        except HandlerCancelled as late:
            error = error or late
            watched.end()
        finally:
            # Also after Ctrl-C in one of these lines.
            watched.is_over = True
            self._watched = None
        if watched.was_sent:
            sessions.close()
            if error is None or isinstance(error, HandlerCancelled) or not ends_the_run(error):
                raise HandlerTimeout(self.seconds) from error
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # which the function has returned

    def is_held_up(self, call: Call) -> bool:  # noqa: ARG002  # as in CallLimits
        """Return ``False``: one call at a time is under way."""
        return False

    def close(self) -> None:
        """End the thread; no call is under way, or an interrupt has left it to itself."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(GRACE)
        if WAKES is not None and self._replaced is not None:
            if signal.getsignal(WAKES) is _do_nothing:
                signal.signal(WAKES, self._replaced)
            self._replaced = None

    def _start(self) -> None:
        if self._thread is None:
            self._let_signals_wake()
            name = f"{self._label}: time limit"
            thread = threading.Thread(target=self._watch, name=name, daemon=True)
            thread.start()
            self._thread = thread

    def _let_signals_wake(self) -> None:
        """Have a handler for the signal, without which it would be ignored."""
        if WAKES is not None:
            with suppress(ValueError):  # the main thread of another interpreter
                if signal.getsignal(WAKES) in (signal.SIG_DFL, signal.SIG_IGN):
                    self._replaced = signal.signal(WAKES, _do_nothing)

    def _watch(self) -> None:
        # A call that begins during the wait is not due before the wait is over.
        pause = self.seconds
        while not self._over.wait(pause):
            now, watched = time.monotonic(), self._watched
            if watched is not None and watched.due <= now:
                watched.due = now + GRACE
                watched.interrupt()
            due = now + self.seconds if watched is None else watched.due
            pause = max(0.0, min(due - now, self.seconds))


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Let CPython raise the error at the thread's next step.

    It is never taken back by setting none: 3.11 and 3.12 would then look for it at each step, and
    without end if a profiler is on.
    """
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread), ctypes.py_object(error))


def _wake_main_thread(thread: int) -> None:
    # Not where a library has a handler in C.
    if WAKES is not None and callable(signal.getsignal(WAKES)):
        signal.pthread_kill(thread, WAKES)


def _do_nothing(*_: object) -> None:
    """Let a wait of the main thread end, and the pending error be raised."""


class Sessions:
    """What Django knew of the open transactions of this thread before the handler was called.

    The interrupt may have come between two steps of Django's own that belong together, and in the
    middle of a statement. So every session is closed, and Django's lists are as they were before.
    """

    def __init__(self) -> None:
        self._before = {
            each.alias: (
                each.in_atomic_block,
                len(each.savepoint_ids),
                len(each.atomic_blocks),
                [*each.execute_wrappers],
            )
            for each in connections.all(initialized_only=True)
        }

    def close(self) -> None:
        """Cancel what a session is still at, and close it; sends nothing on the session itself."""
        for connection in connections.all(initialized_only=True):
            self._close(connection)

    def _close(self, connection: Any) -> None:
        busy = is_busy(connection)
        if busy:
            cancel(connection)
        # Nothing of a connection that the handler has opened.
        before = self._before.get(connection.alias, (False, 0, 0, []))
        was_inside, savepoints, blocks, wrappers = before
        del connection.savepoint_ids[savepoints:]
        del connection.atomic_blocks[blocks:]
        connection.execute_wrappers[:] = wrappers
        connection.in_atomic_block = was_inside
        if was_inside and not busy and any(map(from_test_case, connection.atomic_blocks[:1])):
            # The rows of the test are in this session.
            connection.needs_rollback = False
            return
        # A driver whose session is broken may raise, and then there is nothing left to close.
        with suppress(Exception):
            if connection.vendor == "postgresql" and connection.connection is not None:
                # Not given back to a pool, whose next user would share it with this transaction.
                connection.connection.close()
        with suppress(Exception):
            connection.close()
        if not was_inside:
            # SQLite in memory, which Django does not close.
            with suppress(Exception):
                roll_back(connection)
