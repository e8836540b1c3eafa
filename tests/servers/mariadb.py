"""A private MariaDB from the binaries of Debian's ``mariadb-server``.

python -m tests.servers.mariadb -- COMMAND…

runs COMMAND with ``DATABASE_URL`` set to the server's, and stops the server when it has ended. It
has utf8mb4, and the server's defaults otherwise.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import PATIENCE

from .software import Software, run_with

SOFTWARE = Software(
    "MariaDB", ("mariadb-install-db", "mariadbd"), package="mariadb-server", user="mysql"
)
is_installed = SOFTWARE.is_installed


@contextmanager
def mariadb() -> Iterator[str]:
    """Run a MariaDB for the ``with`` block, and give the URL of an empty server."""
    install, server = SOFTWARE.find()
    with SOFTWARE.folder() as folder:
        options = ["--no-defaults", f"--datadir={folder / 'data'}"]
        SOFTWARE.run(folder, install, *options, "--auth-root-authentication-method=normal")
        path = folder / "socket"
        options += [f"--socket={path}", f"--pid-file={folder / 'pid'}"]
        options += ["--skip-networking", "--character-set-server=utf8mb4"]
        with SOFTWARE.serving(folder, server, *options, is_ready=lambda: _greets(path)):
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


if __name__ == "__main__":
    sys.exit(run_with(mariadb, sys.argv[1:]))
