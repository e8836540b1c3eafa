"""A private MariaDB from the binaries of Debian's ``mariadb-server``.

python -m tests.servers.mariadb -- COMMAND…

runs COMMAND with ``DATABASE_URL`` set to the server's, and stops the server when it has ended. The
server listens on a socket in its own temporary folder, so that no port can be taken; utf8mb4, and
the server's defaults otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BINARIES = ("mariadb-install-db", "mariadbd")
READY_WITHIN = 60.0  # seconds
STOP_WITHIN = 30.0  # seconds, after which it is killed


class MariaDBMissingError(RuntimeError):
    """The binaries are not installed."""


@contextmanager
def mariadb() -> Iterator[str]:
    """Run a MariaDB for the ``with`` block, and give the URL of an empty server."""
    install, server = (_find(name) for name in BINARIES)
    if install is None or server is None:
        raise MariaDBMissingError(
            f"Expected {' and '.join(BINARIES)} on this machine, got neither or one: install "
            "Debian's mariadb-server."
        )
    with tempfile.TemporaryDirectory(prefix="dcl-mariadb-") as name:
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "mysql", "mysql")
        socket_path = folder / "socket"
        log_path = folder / "log"
        with log_path.open("wb") as log:
            options = ["--no-defaults", f"--datadir={folder / 'data'}"]
            subprocess.run(
                [*_as_whom(), install, *options, "--auth-root-authentication-method=normal"],
                check=True,
                stdout=log,
                stderr=log,
            )
            options += [f"--socket={socket_path}", f"--pid-file={folder / 'pid'}"]
            options += ["--skip-networking", "--character-set-server=utf8mb4"]
            # Of its own session: Ctrl-C is for the command, which still needs the server then.
            process = subprocess.Popen(
                [*_as_whom(), server, *options], stdout=log, stderr=log, start_new_session=True
            )
        try:
            _wait_until_ready(process, socket_path, log_path)
            yield f"mysql://root@localhost/mysql?unix_socket={socket_path}"
        finally:
            _stop(process)


def is_installed() -> bool:
    """Say whether the binaries are there."""
    return all(_find(name) for name in BINARIES)


def _find(name: str) -> str | None:
    # Debian puts the server where an ordinary user's PATH does not lead.
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _as_whom() -> list[str]:
    """Return the prefix that runs a command without root's rights, and ends it if we are killed."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    identity = ["--reuid=mysql", "--regid=mysql", "--init-groups"] if os.geteuid() == 0 else []
    return [setpriv, *identity, "--pdeathsig=KILL"]


def _wait_until_ready(process: subprocess.Popen[bytes], socket_path: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while process.poll() is None and time.monotonic() < deadline:
        if _greets(socket_path):
            return
        time.sleep(0.05)
    raise RuntimeError(f"Expected MariaDB to start, but it did not:\n{log.read_text()[-2000:]}")


def _greets(socket_path: Path) -> bool:
    """Say whether the server sends its greeting: it takes connections long before it is ready."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(READY_WITHIN)
        try:
            client.connect(str(socket_path))
            return bool(client.recv(1))
        except OSError:
            return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
    except MariaDBMissingError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
