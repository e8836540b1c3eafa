"""Sends what a worker has counted to the process that has started it.

In a thread, as an idle worker has no moment for it: it may wait for its next row for an hour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dcl_processor import observers

from .collector import Collector
from .tally import Tally

#: Seconds between two messages of a worker that counts something.
INTERVAL = 1.0


@contextmanager
def sent(send: Callable[[str, Tally], None], *, is_share: bool) -> Iterator[None]:
    """Send what is counted in the block, each second and at its end.

    ``is_share``: as for ``Collector``. ``send`` is called in a thread of its own.
    """
    collector = Collector(is_share=is_share)

    def send_all() -> None:
        for name, tally in collector.take().items():
            send(name, tally)

    observers.add(collector)
    try:
        with repeated(send_all, INTERVAL):
            yield
    finally:
        observers.remove(collector)
        send_all()


@contextmanager
def repeated(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call the function each so many seconds, in a thread, until the block ends."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=go_on, name="dcl_processor.metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
