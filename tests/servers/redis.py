"""A private Redis from the binary of Debian's ``redis-server``.

It listens on a socket in a temporary folder of its own, so that no port can be taken, and keeps
nothing on disk.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis as client

BINARY = "redis-server"
READY_WITHIN = 30.0  # seconds
STOP_WITHIN = 10.0  # seconds, after which it is killed


class RedisMissingError(RuntimeError):
    """The binary is not installed."""


@contextmanager
def redis() -> Iterator[str]:
    """Run a Redis for the ``with`` block, and give the URL by which Celery finds it."""
    if not is_installed():
        raise RedisMissingError(
            f"Expected {BINARY} on this machine, got none: install Debian's redis-server."
        )
    with tempfile.TemporaryDirectory(prefix="dcl-redis-") as name:
        socket_path, log_path = Path(name, "socket"), Path(name, "log")
        options = ["--port", "0", "--unixsocket", str(socket_path), "--dir", name, "--save", ""]
        # Of its own session: Ctrl-C is for the tests, which still need the server then.
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*_to_die_with_us(), BINARY, *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, socket_path, log_path)
            yield f"redis+socket://{socket_path}"
        finally:
            _stop(process)


def is_installed() -> bool:
    """Say whether the binary is there."""
    return shutil.which(BINARY) is not None


def _to_die_with_us() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=KILL"] if setpriv else []


def _wait_until_ready(process: subprocess.Popen[bytes], socket_path: Path, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with client.Redis(unix_socket_path=str(socket_path)) as asking:
                asking.ping()
        except client.ConnectionError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"Expected Redis to start, but it did not:\n{log.read_text()[-2000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
