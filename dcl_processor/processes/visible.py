"""How an operator recognises a worker: by PostgreSQL's list of sessions, and by ``ps``.

A session has the worker's name from its first statement, because the name is one of the options
with which it is opened. No statement is sent for it, so a session that is open already has none.
The name is the one column of ``pg_stat_activity`` that every role may read, so it has all that is
needed to find the worker: the processor, the number of the worker, and the host.

Only processes of this package's own are named. In a server that calls the command, other threads
would open sessions under the name, and a pool would keep them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

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
    room = LONGEST - len(first) - len(host) - 2
    return f"{first} {_without_middle(_ascii(work), room)} {host}"


def _ascii(text: str) -> str:
    # PostgreSQL shows other characters as question marks.
    return "".join(each if " " <= each <= "~" else "?" for each in text)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    last = (most - 2) // 2
    return f"{text[: most - 2 - last]}..{text[-last:]}"


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


def title(text: str) -> None:
    """Set the title of this process, which ``ps`` shows, if ``setproctitle`` is installed.

    For processes that this package has started; another process keeps the title of its program.
    """
    if find_spec("setproctitle") is not None:
        import_module("setproctitle").setproctitle(f"dcl {text}")


@contextmanager
def as_worker(work: str) -> Iterator[None]:
    """Give this process, which the package has started, the worker's name everywhere."""
    title(work)
    with named_sessions(work):
        yield
