"""A private MariaDB from the binaries of Debian's ``mariadb-server``.

python -m tests.servers.mariadb -- COMMAND…

runs COMMAND with ``DATABASE_URL`` set to the server's, and stops the server when it has ended. It
has utf8mb4, and the server's defaults otherwise.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import PATIENCE

from .software import ServerMissingError, Software

SOFTWARE = Software(
    "MariaDB", ("mariadb-install-db", "mariadbd"), package="mariadb-server", user="mysql"
)
is_installed = SOFTWARE.is_installed


@contextmanager
def mariadb(*more: str) -> Iterator[str]:
    """Run a MariaDB for the ``with`` block, and give the URL of an empty server.

    ``more``: options of the server.
    """
    install, server = SOFTWARE.find()
    with SOFTWARE.folder() as folder:
        options = ["--no-defaults", f"--datadir={folder / 'data'}"]
        SOFTWARE.run(folder, install, *options, "--auth-root-authentication-method=normal")
        path = folder / "socket"
        options += [f"--socket={path}", f"--pid-file={folder / 'pid'}"]
        options += ["--skip-networking", "--character-set-server=utf8mb4"]
        with SOFTWARE.serving(folder, server, *options, *more, is_ready=lambda: _greets(path)):
            yield f"mysql://root@localhost/mysql?unix_socket={path}"


def _greets(path: Path) -> bool:
    """Say whether the server sends its greeting: it takes connections long before it is ready."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE)
        try:
            client.connect(str(path))
            return bool(client.recv(1))
        except OSError:
            return False


def main(arguments: Sequence[str]) -> int:
    """Run the command after ``--`` with a server, and return its exit code."""
    if arguments[:1] != ["--"] or not arguments[1:]:
        print("Usage: python -m tests.servers.mariadb -- COMMAND…", file=sys.stderr)
        return 2
    # Python would end at once, and the server with its folder would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with mariadb() as url:
            return subprocess.call(arguments[1:], env={**os.environ, "DATABASE_URL": url})
    except ServerMissingError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
