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
    text: str | None = None,
) -> None:
    """Log an error with its traceback; the last placeholder in ``message`` is for its text.

    ``extra``: the fields of the record, to which the class of the error is added. A log formatter
    or handler may raise for an error that cannot be formatted. The record is then logged once more,
    as plain text. ``text``: the traceback, if ``formatted()`` has returned it.
    """
    text = text or formatted(error)
    exc_info = None if text is None else error
    given = (*arguments, error)
    extra = {**(extra or {}), **error_fields(error)}
    try:
        log(logger, logging.ERROR, message, *given, extra=extra, exc_info=exc_info, traceback=text)
    except Exception as second:
        if ends_the_run(second):
            raise
        with suppress(Exception):
            logger.error(message, *arguments, shown_traceback(traceback_text(error)))  # noqa: TRY400  # see above
