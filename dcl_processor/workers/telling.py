"""Tells each row's outcome to whoever watches one processor run, once and not twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dcl_processor.processor import BatchProcessor
from dcl_processor.signals import row_finished

OnRow = Callable[[str], None]


@contextmanager
def watched(processor: BatchProcessor[Any], on_row: OnRow | None) -> Iterator[None]:
    """Call ``on_row`` with the outcome of each row that the processor finishes in the block."""

    def tell(outcome: str, **sent: Any) -> None:
        # A handler may run another processor of the same class.
        if on_row is not None and sent["processor"] is processor:
            on_row(outcome)

    if on_row is not None:
        row_finished.connect(tell, sender=type(processor))
    try:
        yield
    finally:
        row_finished.disconnect(tell, sender=type(processor))


@contextmanager
def quiet_unless_configured() -> Iterator[None]:
    """Keep the log of failed rows from the screen, where they are shown from the report.

    Python prints errors, tracebacks and all, for a logger that nobody has configured.
    """
    logger = logging.getLogger("dcl_processor")
    handler = logging.NullHandler()
    if not logger.hasHandlers():
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
