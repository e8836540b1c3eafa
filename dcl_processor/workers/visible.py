"""How an operator recognises a worker: by PostgreSQL's list of sessions, and by its log.

A session has the worker's name from its first statement, because the name is one of the options
with which it is opened. No statement is sent for it, so a session that is open already has none.
The name is the one column of ``pg_stat_activity`` that every role may read, so it has all that is
needed to find the worker: the processor, the number of the worker, and the host.

Only processes of this package's own are named. In a server that calls the command, other threads
would open sessions under the name, and a pool would keep them.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from dcl_processor.report.errors import printable

#: Bytes of ``application_name`` that PostgreSQL keeps, and characters of a host's name in it.
LONGEST, HOST = 63, 8

#: Characters of the project's own name that stay in front.
BEFORE = 27

_OPTION = "application_name"


def label(names: Sequence[str], number: int = 1, workers: int = 1) -> str:
    """Return a worker's name for people, such as ``"shop.send_shipped_emails 2/4"``."""
    work = names[0] if len(names) == 1 else f"{len(names)} processors"
    return f"{work} {number}/{workers}" if workers > 1 else work


def session_name(work: str, before: str = "") -> str:
    """Return the ``application_name`` of a worker's sessions, of at most 63 bytes.

    ``work``: as from ``label()``. ``before``: the name that the project has set, which stays in
    front. Where it is too long, the middle of ``work`` is left out, and never the worker's number.
    """
    first = f"{_ascii(before)[:BEFORE]} dcl".strip()
    host = _ascii(socket.gethostname())[:HOST]
    work, room = _ascii(work), LONGEST - len(first) - len(host) - 2
    if len(work) > room:
        last = (room - 2) // 2
        work = f"{work[: room - 2 - last]}..{work[-last:]}"
    return f"{first} {work} {host}"


def _ascii(text: str) -> str:
    # PostgreSQL shows other characters as question marks.
    return "".join(each if " " <= each <= "~" else "?" for each in text)


@contextmanager
def named_sessions(work: str) -> Iterator[None]:
    """Give the worker's name to the sessions of PostgreSQL that this process opens in the block.

    Those of all databases and of all threads. Sends nothing.
    """
    before: dict[str, dict[str, Any]] = {}
    for alias in _postgresql():
        settings = connections[alias].settings_dict
        options = before[alias] = settings.setdefault("OPTIONS", {})
        own = str(options.get(_OPTION) or os.environ.get("PGAPPNAME", ""))
        # Replaced and not changed, because settings may share the options of several databases.
        settings["OPTIONS"] = {**options, _OPTION: session_name(work, own)}
    try:
        yield
    finally:
        for alias, options in before.items():
            connections[alias].settings_dict["OPTIONS"] = options


def _postgresql() -> Iterator[str]:
    for alias in connections:
        # A database whose driver is not installed is not one of this worker.
        with suppress(ImproperlyConfigured):
            if connections[alias].vendor == "postgresql":
                yield alias


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
