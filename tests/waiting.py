"""How long the suite waits, and what it raises when that was not long enough.

A test waits for an event: a row that is there, a thread that ends, a line that is printed. It
waits generously, because machines stand still for seconds. A wait that runs out raises ``Late``,
which is no verdict on the code: ``tests/suite.py`` repeats such a test at the end, alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

#: Seconds that any wait of the suite lasts at most.
PATIENCE = float(os.environ.get("PATIENCE", "120"))
#: Seconds between two looks.
PAUSE = 0.01


class Late(Exception):
    """What a test waited for did not come within ``PATIENCE``."""

    def __init__(self, what: str) -> None:
        super().__init__(f"expected {what} within {PATIENCE:g} s, and it did not come")


class Ends(Protocol):
    """A thread, or a process of ``multiprocessing``."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


def until(
    happened: Callable[[], T], what: str = "something to become true", pause: float = PAUSE
) -> T:
    """Look again and again until something true is returned, and return it."""
    end = time.monotonic() + PATIENCE
    while not (seen := happened()):
        if time.monotonic() > end:
            raise Late(what)
        time.sleep(pause)
    return seen


def wait(event: Any, what: str = "another thread to come here") -> None:
    """Wait for an event of ``threading`` or ``multiprocessing``."""
    if not event.wait(PATIENCE):
        raise Late(what)


def join(*those: Ends) -> None:
    """Wait for the end of each."""
    for each in those:
        each.join(PATIENCE)
        if each.is_alive():
            raise Late(f"the end of {each}")


def take(queue: SimpleQueue[T], what: str) -> T:
    """Return the next thing out of a queue."""
    try:
        return queue.get(timeout=PATIENCE)
    except Empty:
        raise Late(what) from None


class Barrier(threading.Barrier):
    """A meeting of so many threads that raises ``Late`` where not all of them come."""

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(PATIENCE if timeout is None else timeout)
        except threading.BrokenBarrierError:
            raise Late(f"{self.parties} threads to meet") from None
