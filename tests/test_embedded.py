"""The embedded PostgreSQL outlives whatever is done to its users and to itself.

Every folder here has a space in its path, as a user's may.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest

from sample_app import supervisor
from sample_app.embedded import CHECKOUT
from tests.waiting import PATIENCE, until

USER = """
import sys
from pathlib import Path
from sample_app import embedded
if sys.argv[2:]:
    embedded._wheel = lambda: Path(sys.argv[2])
print(embedded.database_url("shop", home=Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


class User:
    """A process that asks for the server and uses it until an order to end."""

    def __init__(self, *arguments: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, *map(str, arguments)],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate("", timeout=PATIENCE)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


StartUser = Callable[..., User]


@pytest.fixture
def start_user() -> Iterator[StartUser]:
    """Give the way to start users; none outlives its test."""
    users: list[User] = []

    def start(*arguments: Path) -> User:
        users.append(User(*arguments))
        return users[-1]

    yield start
    for user in users:
        if user.process.returncode is None:
            user.kill()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Give a short folder that the server's user may enter when root runs the tests."""
    path = Path(tempfile.mkdtemp(prefix="dcl "))
    path.chmod(0o711)
    yield path
    kill(processes_of(path))
    until(lambda: not processes_of(path), "the end of the servers")
    shutil.rmtree(path)


def test_processes_that_start_it_at_once_share_one_server_until_the_last_has_ended(
    folder: Path, start_user: StartUser
) -> None:
    home = folder / "at once"
    users = [start_user(home) for _ in range(4)]
    urls = {user.url() for user in users}
    assert len(urls) == 1
    assert urls.pop().endswith("/shop")
    started = started_at(home)
    # It opens no folder to the world.
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o711
    assert stat.S_IMODE((home / "data").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "log").stat().st_mode) == 0o600

    users[0].end()
    users[1].kill()
    users[2].kill()
    time.sleep(5 * supervisor.POLL)
    assert started_at(home) == started, "it was stopped under a process that used it"

    users[3].kill()
    wait_until_stopped(home)


def started_at(home: Path) -> object:
    folder, port = str(home / "data"), supervisor.PORT
    with psycopg.connect(host=folder, port=port, user="postgres", dbname="shop") as connection:
        row = connection.execute("SELECT pg_postmaster_start_time()").fetchone()
    assert row is not None
    return row[0]


def processes_of(home: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(home) in argument for argument in process.info["cmdline"] or ())
    ]


def kill(processes: Iterable[psutil.Process]) -> None:
    doomed = list(processes)
    # Frozen first: one that outlives another for a moment would see it die, and tidy up.
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                end(process)


def wait_until_stopped(home: Path) -> None:
    locks = [home / "supervisor.lock", home / "server.lock"]
    until(lambda: not any(supervisor.is_locked(lock) for lock in locks), "the server's end")
