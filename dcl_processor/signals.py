"""The signals that a run sends, for a progress bar, or code of the project.

Each is sent in the process, and in the thread, where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

if TYPE_CHECKING:
    from .processor import BatchProcessor

#: Sent when a run begins, before it looks for rows. ``sender``: the processor's class;
#: ``processor``; ``run_id``.
run_started = Signal()

#: Sent before each call of a handler, for each row that it gets. ``sender``: the processor's class;
#: ``processor``; ``pk``; ``attempt``: its number, if a ``retry`` counts it.
row_started = Signal()

#: Sent after each row for which a handler was called, once its transaction has ended.
#: ``sender``: the processor's class; ``processor``; ``pk``; ``outcome``: "processed", "failed",
#: "discarded" or "snoozed"; ``attempt``: its number, if it is known; ``duration``: seconds that the
#: handler took, if it was called in this process; with ``process_batch()``, that of the call.
row_finished = Signal()

#: Sent at the end of each run, except a run that raises. ``sender``: the processor's class;
#: ``processor``; ``report``.
run_finished = Signal()

#: Takes the outcome of one row.
OnRow = Callable[[str], None]


@contextmanager
def row_callback(processor: BatchProcessor[Any], on_row: OnRow | None) -> Iterator[None]:
    """Call ``on_row`` with the outcome of each row that the processor finishes in the block."""

    def receive(outcome: str, **sent: Any) -> None:
        # A handler may run another processor of the same class.
        if on_row is not None and sent["processor"] is processor:
            on_row(outcome)

    if on_row is not None:
        row_finished.connect(receive, sender=type(processor))
    try:
        yield
    finally:
        row_finished.disconnect(receive, sender=type(processor))
