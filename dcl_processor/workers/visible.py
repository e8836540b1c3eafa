"""How an operator recognises a worker: by PostgreSQL's list of sessions, and by its log."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from dcl_processor.report.errors import printable

#: Bytes of ``application_name`` that PostgreSQL keeps; characters of the host's name in it.
LONGEST, HOST = 63, 8

#: The variable that names a session unless ``DATABASES`` does.
APPLICATION_NAME = "PGAPPNAME"


def label(names: Sequence[str], number: int = 1, workers: int = 1) -> str:
    """Return a worker's name for people, such as ``"shop.send_shipped_emails 2/4"``."""
    work = names[0] if len(names) == 1 else f"{len(names)} processors"
    return f"{work} {number}/{workers}" if workers > 1 else work


@contextmanager
def named_sessions(work: str) -> Iterator[None]:
    """Give the worker's name to the sessions of PostgreSQL that this process opens in the block.

    The name is the one column of ``pg_stat_activity`` that every role may read, so it has all that
    is needed to find the worker: the processor, its number, and the host. A project's own name,
    by the variable or in ``DATABASES``, stays. ``work``: as from ``label()``; of one that is too
    long the end is kept, which has the number.
    """
    if APPLICATION_NAME in os.environ:
        yield
        return
    host = ascii_only(socket.gethostname()[:HOST])
    # PostgreSQL shows other characters as question marks, some of them as several.
    os.environ[APPLICATION_NAME] = f"dcl {ascii_only(work)[-LONGEST + len(host) + 5 :]} {host}"
    try:
        yield
    finally:
        del os.environ[APPLICATION_NAME]


def ascii_only(text: str) -> str:
    return text.encode("ascii", "replace").decode()


# --- what the package's loggers write to stderr where the project configures no logging


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
        handler.level <= logging.ERROR
        and getattr(handler, "stream", None) in (sys.stderr, sys.__stderr__)
        for handler in _handlers()
    )


def _handlers() -> Iterator[logging.Handler]:
    each: logging.Logger | None = logger
    while each is not None:
        yield from each.handlers
        each = each.parent if each.propagate else None


class _Stderr(logging.Handler):
    """Writes one line per record to the current stderr: a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # a reader that has gone ends no run
            # One write: print() would write the newline separately, and workers would share a line.
            sys.stderr.write(printable(record.getMessage()) + "\n")
            sys.stderr.flush()
