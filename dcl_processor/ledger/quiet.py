"""What a run asks of the ledger's tables, and goes on without if they do not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from dcl_processor.pending import steady as time
from dcl_processor.report.errors import described
from dcl_processor.report.interrupts import ends_the_run

T = TypeVar("T")

logger = logging.getLogger("dcl_processor.operations")

#: Seconds that a statement of a run waits for a lock of another session.
RUN_WAIT = 1.0

#: Seconds without a further question in this process after an error.
SILENCE = 60.0


class _Silence:
    until = 0.0


def quietly(ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer, or without one something else; an error is logged, and costs no row."""
    now = time.monotonic()
    if now < _Silence.until:
        return otherwise
    try:
        return ask()
    except Exception as error:
        if ends_the_run(error):
            raise
        _Silence.until = time.monotonic() + SILENCE
        about = (SILENCE, described(error))
        logger.warning("the ledger cannot be used, and is not asked for %d s: %s", *about)
        return otherwise
