"""The stop: the first signal ends the run after the row in flight, the second one kills.

SIGHUP (a closed terminal) and SIGQUIT have the same effect as SIGINT and SIGTERM.

Only the command installs these handlers; ``run()`` takes the event.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dcl_processor.pending import steady as time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Seconds between two looks while a run waits for rows that other workers have locked.
POLL = 0.05


class Stop(threading.Event):
    """An event that a signal handler may set.

    The lock of a plain event is not reentrant: ``set()``, in a handler that interrupts the same
    event's ``wait()``, would never return.
    """

    _asked = False
    #: The signal that has set it, if one has.
    signum: int | None = None
    #: Called before the second signal ends this process.
    kill: Callable[[], None] | None = None

    @property
    def cause(self) -> str:
        """The name of the signal that has set it, or ``"a stop"``."""
        return "a stop" if self.signum is None else signal.Signals(self.signum).name

    def is_set(self) -> bool:
        return self._asked

    def set(self) -> None:
        self._asked = True

    def clear(self) -> None:
        self._asked = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = POLL if end is None else end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(left, POLL))
        return self.is_set()


@contextmanager
def polite_stop(on_first: Callable[[Stop], None] = lambda _: None) -> Iterator[Stop]:
    """Install the handlers for ``SIGNALS``, and restore the previous ones at the end.

    ``on_first`` is called in the handler of the first signal, with the stop. The second signal ends
    the process, also one whose handler catches everything or is in C. Outside the main thread,
    where Python allows no handlers, the event is never set.
    """
    stop = Stop()

    def handler(signum: int, _: Any) -> None:
        is_second = stop.is_set()
        stop.signum = signum
        stop.set()
        if is_second and stop.kill is not None:
            stop.kill()
        if is_second or stop.kill is None:
            for each in installed:
                signal.signal(each, signal.SIG_DFL)
        if is_second:
            os.kill(os.getpid(), signum)
        else:
            on_first(stop)

    with handled_by(handler) as installed:
        yield stop


@contextmanager
def workers_stop() -> Iterator[Stop]:
    """Stop at SIGTERM, however often it comes, and leave it to the parent to count signals.

    A terminal sends SIGINT and SIGHUP to the whole process group, and a service manager may send
    SIGTERM to every process: a worker then gets the same signal twice, from its parent as well.
    """
    stop = Stop()
    with (
        handled_by(lambda *_: stop.set(), [signal.SIGTERM]) as before,
        handled_by(signal.SIG_IGN, [each for each in SIGNALS if each != signal.SIGTERM]),
    ):
        # The parent has blocked them until this process has handlers for them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield stop
        finally:
            # The parent may pass it on when this process has done its work and is about to end.
            before[signal.SIGTERM] = signal.SIG_IGN


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals while a worker is started and noted.

    One that comes before the worker has its handlers would kill it; one that interrupts the parent
    before it has noted the worker would leave a worker that the parent does not end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: The handlers that those of the package have replaced, the outermost first.
_replaced: list[dict[signal.Signals, Any]] = []


def _restore_in_child() -> None:
    """Let a signal end a process that a handler has forked, such as one of a pool."""
    while _replaced:
        for each, before in _replaced.pop().items():
            signal.signal(each, before)


os.register_at_fork(after_in_child=_restore_in_child)


@contextmanager
def handled_by(
    handler: Any, signals: Iterable[signal.Signals] = SIGNALS
) -> Iterator[dict[signal.Signals, Any]]:
    """Install the handler for the block, and yield the previous handlers of its signals."""
    # A signal that is already ignored stays ignored: a shell does so on purpose for a background
    # process. None is a handler that was not installed from Python, and could not be restored.
    previous = {
        each: before
        for each in signals
        if threading.current_thread() is threading.main_thread()
        and (before := signal.getsignal(each)) not in (signal.SIG_IGN, None)
    }
    _replaced.append(previous)
    for each in previous:
        signal.signal(each, handler)
    try:
        yield previous
    finally:
        _replaced.remove(previous)
        for each, before in previous.items():
            signal.signal(each, before)
