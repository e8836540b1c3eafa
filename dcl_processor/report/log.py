"""The records of the logger ``dcl_processor``: in one line, masked, and with fields.

``processor``, ``pk``, ``outcome``, ``attempt``, ``duration`` (seconds), ``worker``, ``using``,
``error_type``, ``run_id`` and ``row_count``: plain values, and only those that are known.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from dcl_processor.options import worker
from dcl_processor.report.errors import (
    described,
    escaped,
    printable,
    shown_traceback,
    traceback_text,
)

logger = logging.getLogger("dcl_processor")

#: The fields of this context's run, which its threads share.
running: ContextVar[dict[str, Any] | None] = ContextVar("dcl_processor_log", default=None)


def log(
    level: int,
    message: str,
    *arguments: Any,
    error: BaseException | None = None,
    text: str = "",
    **known: Any,
) -> None:
    """Log a record whose errors are masked, in one line, also in the traceback.

    ``error``: the record's ``exc_info``; ``text``: its traceback, if that is known. ``known``:
    fields; those that are ``None`` are left out, and so are those that a project has set itself.
    """
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    info: Any = error and (type(error), error, error.__traceback__)
    place = (logger.name, level, file, line, message, tuple(map(_said, arguments)), info, function)
    record = logger.makeRecord(*place)
    for each in (error, *arguments):
        if isinstance(each, BaseException):
            known["error_type"] = type(each).__qualname__
    if "pk" in known:
        known["pk"] = printable(str(known["pk"]))
    found = {"worker": worker.number, **(running.get() or {}), **known}
    found = {name: value for name, value in found.items() if value is not None}
    vars(record).update({**found, **vars(record)})
    if error is not None:
        # A formatter takes this text, and makes none of its own from ``exc_info``.
        record.exc_text = shown_traceback(text or traceback_text(error)).rstrip("\n")
    try:
        logger.handle(record)
    except Exception:  # noqa: BLE001  # a handler or filter of the project; as logging's own do
        logging.Handler().handleError(record)


def _said(argument: Any) -> Any:
    if isinstance(argument, BaseException):
        return described(argument)
    return escaped(argument) if isinstance(argument, str) else argument
