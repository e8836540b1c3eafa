"""Follows a run for a person at a terminal: corrects its figures, and writes them as lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor import steady as time
from dcl_processor.insights.backlog_size import SECONDS, Size, size
from dcl_processor.processor import BatchProcessor
from dcl_processor.signals import OnRow

from .headway import Headway

#: Seconds between two corrections of an estimate, and between two lines.
CORRECTED_EACH, LINE_EACH = 30.0, 10.0

#: Shows the figures in a block, and gives what counts a row's outcome.
Show = Callable[[Headway], AbstractContextManager[OnRow]]


@contextmanager
def followed(
    processor: BatchProcessor[Any],
    show: Show,
    *,
    filter: Q | None,
    using: str | None,
    limit: int | None,
) -> Iterator[OnRow | None]:
    """Show how far a run is while the block runs it; yield what counts a row, if any is pending."""
    ask = partial(size, processor, filter=filter, using=using)
    found = ask()
    if found.counted.value == 0:
        yield None
        return
    headway = Headway(processor.name, found, limit=limit)
    with corrected(headway, ask), show(headway) as on_row:
        yield on_row


@contextmanager
def corrected(headway: Headway, ask: Callable[[], Size]) -> Iterator[None]:
    """Correct the figures by the size of the backlog while the block runs, if they are estimates.

    ``ask``: returns the size at that moment.
    """
    if not headway.is_estimated:
        yield
        return
    ended = threading.Event()
    # In a thread, which has a connection of its own: that of the run is in a row's transaction, or
    # has sent the beginning of the next one.
    thread = threading.Thread(
        target=_correct, args=(headway, ask, ended), name="dcl_processor.following", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # Each of its two questions ends with its time limit.
        thread.join(2 * SECONDS)


def _correct(headway: Headway, ask: Callable[[], Size], ended: threading.Event) -> None:
    while headway.is_estimated and not ended.wait(CORRECTED_EACH):
        try:
            headway.learn(ask())
        finally:
            # A session that waits for its next question would be one more of the server's.
            connections.close_all()


@contextmanager
def lines(
    headway: Headway,
    *,
    write: Callable[[Headway], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[OnRow]:
    """Call ``write`` now and then, when a row is done."""
    last, lock = clock(), threading.Lock()

    def count(outcome: str) -> None:
        nonlocal last
        headway.count(outcome)
        with lock:
            is_time = clock() - last >= LINE_EACH
            last = clock() if is_time else last
        if is_time:
            write(headway)

    yield count
