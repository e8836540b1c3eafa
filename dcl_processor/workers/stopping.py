"""The stop: the first signal ends the run after the row in flight, the second one kills.

SIGHUP (a closed terminal) and SIGQUIT have the same effect as SIGINT and SIGTERM.

Only the command installs these handlers; ``run()`` takes the event.
"""

from __future__ import annotations

import math
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
    #: Called before the second signal ends this process.
    kill: Callable[[], None] | None = None

    def is_set(self) -> bool:
        return self._asked

    def set(self) -> None:
        self._asked = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL))
        return self.is_set()


@contextmanager
def polite_stop(on_first: Callable[[str], object]) -> Iterator[Stop]:
    """Install the handlers for ``SIGNALS``, and restore the previous ones at the end.

    ``on_first`` is called in the handler of the first signal, with its name. The second signal ends
    the process, also one whose handler catches everything or is in C. Outside the main thread,
    where Python allows no handlers, the event is never set.
    """
    stop = Stop()

    def handler(signum: int, _: Any) -> None:
        is_first = not stop.is_set()
        stop.set()
        if is_first:
            on_first(signal.Signals(signum).name)
        elif stop.kill is not None:
            stop.kill()
        if stop.kill is None or not is_first:
            for each in installed:
                signal.signal(each, signal.SIG_DFL)
        if not is_first:
            os.kill(os.getpid(), signum)

    with handled_by(handler) as installed:
        yield stop


@contextmanager
def workers_stop() -> Iterator[Stop]:
    """Stop at SIGTERM, however often it comes, and leave it to the parent to count signals.

    A service manager may send it to every process, and the parent passes it on.
    """
    stop = Stop()
    with handled_by(lambda *_: stop.set(), [signal.SIGTERM]):
        yield stop


@contextmanager
def handled_by(
    handler: Any, signals: Iterable[signal.Signals] = SIGNALS
) -> Iterator[dict[signal.Signals, Any]]:
    """Install the handler for the block, and yield the previous handlers of its signals.

    A process that is forked in the block has those: a signal ends one of a pool.
    """
    owner = os.getpid()

    def unless_forked(signum: int, frame: Any) -> None:
        if os.getpid() == owner:
            handler(signum, frame)
        else:
            signal.signal(signum, previous[signal.Signals(signum)])
            os.kill(os.getpid(), signum)

    # A signal that is already ignored stays ignored: a shell does so on purpose for a background
    # process. None is a handler that was not installed from Python, and could not be restored.
    previous = {
        each: before
        for each in signals
        if threading.current_thread() is threading.main_thread()
        and (before := signal.getsignal(each)) not in (signal.SIG_IGN, None)
    }
    for each in previous:
        signal.signal(each, unless_forked)
    try:
        yield previous
    finally:
        for each, before in previous.items():
            signal.signal(each, before)
