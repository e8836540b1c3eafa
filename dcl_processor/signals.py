"""The signals that a run sends, for a progress bar, metrics or tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

if TYPE_CHECKING:
    from .processor import BatchProcessor

#: Sent after each row for which a handler was called, once its transaction has ended.
#: ``sender``: the processor's class; ``processor``; ``pk``; ``outcome``: "processed", "failed",
#: "discarded" or "snoozed".
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
