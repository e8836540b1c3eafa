"""A private Redis from the binary of Debian's ``redis-server``, which keeps nothing on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis as client

from .software import Software

SOFTWARE = Software("Redis", ("redis-server",), package="redis-server", user="nobody")
is_installed = SOFTWARE.is_installed


@contextmanager
def redis() -> Iterator[str]:
    """Run a Redis for the ``with`` block, and give the URL by which Celery finds it."""
    [server] = SOFTWARE.find()
    with SOFTWARE.folder() as folder:
        socket = folder / "socket"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", ""]
        with SOFTWARE.serving(folder, server, *options, is_ready=lambda: _answers(socket)):
            yield f"redis+socket://{socket}"


def _answers(socket: Path) -> bool:
    try:
        with client.Redis(unix_socket_path=str(socket)) as asking:
            return bool(asking.ping())
    except client.ConnectionError:
        return False
