"""Room on the disk for a file that is mapped into memory.

A file that is only extended has no blocks. On a full disk, a write to its map ends the process by
SIGBUS, which no ``except`` catches.
"""

from __future__ import annotations

import errno
import os


def fill(file: int, content: bytes) -> None:
    """Write a new file, given by its descriptor; raise ``OSError`` unless all of it has room."""
    # A disk with some room left takes a part of it, without an error.
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
