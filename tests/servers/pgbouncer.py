"""A private PgBouncer from the binary of Debian's ``pgbouncer``, before a PostgreSQL.

It listens on a socket in a temporary folder of its own, so that no port can be taken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

BINARY = "pgbouncer"
PORT = 6432  # of the socket's name alone
READY_WITHIN = 30.0  # seconds
STOP_WITHIN = 10.0  # seconds, after which it is killed


class PgBouncerMissingError(RuntimeError):
    """The binary is not installed."""


@contextmanager
def pgbouncer(
    database: Mapping[str, Any], *, mode: str, **settings: object
) -> Iterator[dict[str, Any]]:
    """Run a PgBouncer before one of Django's ``DATABASES``; give the same, as seen through it.

    ``mode``: "session", "transaction" or "statement". ``settings``: others of its configuration.
    """
    binary = _find()
    if binary is None:
        raise PgBouncerMissingError(
            f"Expected {BINARY} on this machine, got none: install Debian's package of that name."
        )
    with tempfile.TemporaryDirectory(prefix="dcl-pgbouncer-") as name:
        folder = Path(name)
        server = f"host={database['HOST']} port={database['PORT']} user={database['USER']}"
        config = folder / "pgbouncer.ini"
        lines = {
            "unix_socket_dir": name,
            "listen_port": PORT,
            "auth_type": "any",
            "pool_mode": mode,
            **settings,
        }
        config.write_text(
            f"[databases]\n* = {server}\n[pgbouncer]\n"
            + "".join(f"{key} = {value}\n" for key, value in lines.items())
        )
        if os.geteuid() == 0:
            # The embedded PostgreSQL runs as the same user, and its socket is for that one only.
            shutil.chown(folder, "nobody")
        log_path = folder / "log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*_as_whom(), binary, str(config)], stdout=log, stderr=log, start_new_session=True
            )
        try:
            _wait_until_ready(process, folder, database["USER"], log_path)
            yield {**database, "HOST": name, "PORT": str(PORT)}
        finally:
            _stop(process)


def is_installed() -> bool:
    """Say whether the binary is there."""
    return _find() is not None


def _find() -> str | None:
    # Debian puts the server where an ordinary user's PATH does not lead.
    return shutil.which(BINARY, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def _as_whom() -> list[str]:
    """Return the prefix that runs a command without root's rights, and ends it if we are killed."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    identity = ["--reuid=nobody", "--clear-groups"] if os.geteuid() == 0 else []
    return [setpriv, *identity, "--pdeathsig=KILL"]


def _wait_until_ready(process: subprocess.Popen[bytes], folder: Path, user: str, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while process.poll() is None and time.monotonic() < deadline:
        try:
            # Its own console, so that no connection to PostgreSQL is opened for the question.
            psycopg.connect(
                host=str(folder), port=PORT, user=user, dbname="pgbouncer", autocommit=True
            ).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"Expected PgBouncer to start, but it did not:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGINT would wait for the clients to leave.
    process.terminate()
    try:
        process.wait(STOP_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
