"""The polite stop: the first signal ends the run after the row in flight, the second one at once.

SIGHUP (a closed terminal) and SIGQUIT have the same effect as SIGINT and SIGTERM.

Only the command installs these handlers; ``run()`` takes the event.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dcl_processor.pending import steady as time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

#: Seconds between two looks while a run waits for rows that other workers have locked.
POLL = 0.05


class StoppedAtOnce(KeyboardInterrupt):
    """The second signal: whatever is open is rolled back on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop(threading.Event):
    """An event that a signal handler may set.

    The lock of a plain event is not reentrant: ``set()``, in a handler that interrupts the same
    event's ``wait()``, would never return.
    """

    _asked = False
    #: The signal that has set it, if one has.
    signum: int | None = None

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

    ``on_first`` is called in the handler of the first signal, with the stop. The second raises
    ``StoppedAtOnce``. Outside the main thread, where Python allows no handlers, the event is never
    set.
    """
    stop = Stop()

    def handler(signum: int, _: FrameType | None) -> None:
        if stop.is_set():
            raise StoppedAtOnce(signum)
        stop.signum = signum
        stop.set()
        on_first(stop)

    with handled_by(handler):
        yield stop


#: The handlers that those of the package have replaced, the outermost first.
replaced: list[dict[signal.Signals, Any]] = []


def _restore_in_child() -> None:
    """Let a signal end a process that a handler has forked, such as one of a pool."""
    while replaced:
        for each, before in replaced.pop().items():
            signal.signal(each, before)


os.register_at_fork(after_in_child=_restore_in_child)


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], signals: Iterable[signal.Signals] = SIGNALS
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
    replaced.append(previous)
    for each in previous:
        signal.signal(each, handler)
    try:
        yield previous
    finally:
        replaced.remove(previous)
        for each, before in previous.items():
            signal.signal(each, before)
