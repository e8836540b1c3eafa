"""What the package's loggers write to stderr where the project configures no logging."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dcl_processor.errors import printable

logger = logging.getLogger("dcl_processor")
operations = logging.getLogger("dcl_processor.operations")


@contextmanager
def quiet_unless_configured() -> Iterator[None]:
    """Keep the log of failed rows from the screen, which shows them from the report.

    For a logger that is not configured, Python prints errors with their tracebacks. Messages that
    are in no report are shown on stderr in any case.
    """
    handlers: list[tuple[logging.Logger, logging.Handler]] = []
    if not logger.hasHandlers():
        handlers.append((logger, logging.NullHandler()))
    if not logs_to_stderr():
        handlers.append((operations, _Stderr(logging.WARNING)))
    for each, handler in handlers:
        each.addHandler(handler)
    try:
        yield
    finally:
        for each, handler in handlers:
            each.removeHandler(handler)


def logs_to_stderr() -> bool:
    """Return whether the logger writes errors to stderr: then they are not to be repeated."""
    return logger.isEnabledFor(logging.ERROR) and any(
        handler.level <= logging.ERROR and _is_stderr(handler) for handler in _handlers()
    )


def _handlers() -> Iterator[logging.Handler]:
    each: logging.Logger | None = logger
    while each is not None:
        yield from each.handlers
        each = each.parent if each.propagate else None


def _is_stderr(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None)
    if stream is None or stream is sys.stderr or stream is sys.__stderr__:
        return stream is not None
    with suppress(OSError, ValueError, AttributeError):
        return bool(stream.fileno() == 2)
    return False


class _Stderr(logging.Handler):
    """Writes one line per record to the current stderr: a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # a reader that has gone ends no run
            # One write: print() would write the newline separately, and workers would share a line.
            sys.stderr.write(printable(record.getMessage()) + "\n")
            sys.stderr.flush()
