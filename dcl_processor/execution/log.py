"""Log an error that user code raised, even if formatting it fails."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from dcl_processor.errors import describe, formatted, printable, traceback_text
from dcl_processor.interrupts import ends_the_run

logger = logging.getLogger("dcl_processor")


def log_error(error: BaseException, message: str, *arguments: Any) -> None:
    """Log an error with its traceback; the last placeholder in ``message`` is for its text.

    A log formatter or handler may raise for an error that cannot be formatted. The record is then
    logged once more, as plain text.
    """
    exc_info = None if formatted(error) is None else error
    try:
        logger.error(message, *arguments, printable(describe(error)), exc_info=exc_info)
    except Exception as second:
        if ends_the_run(second):
            raise
        with suppress(Exception):
            logger.error(message, *arguments, traceback_text(error))  # noqa: TRY400  # see above
