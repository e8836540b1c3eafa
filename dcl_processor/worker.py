"""The names of this worker, for a column that shows who has a row, and of this user."""

from __future__ import annotations

import getpass
import os
import socket

#: Characters of the host's name that are kept, so that the whole name fits a column of 80.
HOST = 64

#: The number of the worker that this process is, once its task is read; 0: it is none.
number = 0

#: When the run began that this process does a share of, in seconds since 1970.
began: float | None = None


def worker_name() -> str:
    """Return ``host:pid:worker``, such as ``"web1:4711:2"``, of at most 80 characters.

    ``worker`` is the number of the worker that ``processors run --workers`` started, and 0 in any
    other process. Use the function as a value of ``claim``: it is called at each claim, so that a
    process that was forked has its own name.
    """
    return f"{host()}:{os.getpid()}:{number}"


def host() -> str:
    """Return the name of this host, as columns keep it."""
    return socket.gethostname()[:HOST]


def this_user() -> str:
    """Return ``user@host`` of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        user = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"
