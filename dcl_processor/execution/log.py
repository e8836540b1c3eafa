"""Log an error that user code raised, even if formatting it fails."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from dcl_processor.errors import formatted, traceback_text
from dcl_processor.interrupts import ends_the_run
from dcl_processor.log_fields import error_fields, log
from dcl_processor.masking import shown_traceback

logger = logging.getLogger("dcl_processor")


def log_error(
    error: BaseException,
    message: str,
    *arguments: Any,
    extra: dict[str, Any] | None = None,
    can_be_formatted: bool | None = None,
) -> None:
    """Log an error with its traceback; the last placeholder in ``message`` is for its text.

    ``extra``: the fields of the record, to which the class of the error is added. A log formatter
    or handler may raise for an error that cannot be formatted. The record is then logged once more,
    as plain text. ``can_be_formatted``: whether ``formatted()`` returns a text, if that is known.
    """
    if can_be_formatted is None:
        can_be_formatted = formatted(error) is not None
    exc_info = error if can_be_formatted else None
    extra = {**(extra or {}), **error_fields(error)}
    try:
        log(logger, logging.ERROR, message, *arguments, error, extra=extra, exc_info=exc_info)
    except Exception as second:
        if ends_the_run(second):
            raise
        with suppress(Exception):
            logger.error(message, *arguments, shown_traceback(traceback_text(error)))  # noqa: TRY400  # see above
