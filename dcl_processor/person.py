"""Who gives an order, or acts on rows, if no name is given: the user of this process."""

from __future__ import annotations

import getpass
import os
import socket


def this_user() -> str:
    """Return ``user@host`` of this process."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user may have no name
        user = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    return f"{user}@{socket.gethostname()}"
