"""A watcher outlives its database server, which is really stopped and started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from dcl_processor import alive
from sample_app import embedded, supervisor
from tests.edge.manage import CHECKOUT, at_gate
from tests.edge.test_health import wait_until_written_again
from tests.edge.watchers import watching
from tests.waiting import PATIENCE, until

FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT  # what pg_ctl sends
GONE = "warehouse.deliver: expected the database 'default' to answer, got"
#: What a look meets that comes just as the server is back; and the look after it.
BACK = "warehouse.deliver: the database reported: "
AGAIN = r"warehouse.deliver: runs again after \d+\.\d s"


@dataclass(frozen=True)
class Server:
    """A PostgreSQL of this module's own, and the parcels in it."""

    home: Path
    url: str

    def start(self) -> None:
        embedded.database_url("postgres", home=self.home)

    def stop(self, how: signal.Signals) -> None:
        pid = int((self.home / "data" / "postmaster.pid").read_text().split("\n", 1)[0])
        os.kill(pid, how)
        until(lambda: not supervisor.is_locked(self.home / "supervisor.lock"), "its end")

    def ask(self, sql: str, *arguments: object) -> Any:
        """Execute a statement in a session of its own; a module of Django's would be in the way."""
        host, port = str(self.home / "data"), supervisor.PORT
        with psycopg.connect(host=host, port=port, user="postgres", dbname="postgres") as session:
            return session.execute(sql, arguments).fetchone()

    def parcel(self, note: str = "") -> None:
        self.ask(
            "INSERT INTO tests_parcel (sent, tries, priority, note) VALUES (false, 0, 0, %s) "
            "RETURNING id",
            note,
        )

    def wait_until_sent(self) -> None:
        question = "SELECT count(*) FROM tests_parcel WHERE NOT sent"
        until(lambda: self.ask(question) == (0,), "the parcels to be sent")


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Give a short folder that the server's user may enter when root runs the tests."""
    folder = Path(tempfile.mkdtemp(prefix="dcl"))
    folder.chmod(0o711)
    home = folder / "pg"
    yield home
    os.close(embedded._in_use.pop(home))
    embedded.remove(home)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def url(home: Path) -> str:
    """Start the server, and make the tables."""
    url = embedded.database_url("postgres", home=home)
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"],
        # It checks the pages of the shop, too, which need the apps of the admin.
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": url},
        cwd=CHECKOUT,
        check=True,
        timeout=PATIENCE,
    )
    return url


VARIABLES = {"DJANGO_SETTINGS_MODULE": "tests.warehouse.settings", "PYTHONPATH": str(CHECKOUT)}


@pytest.fixture
def server(home: Path, url: str) -> Server:
    embedded.database_url("postgres", home=home)
    server = Server(home, url)
    server.ask("WITH gone AS (DELETE FROM tests_parcel RETURNING id) SELECT count(*) FROM gone")
    return server


def connections_of(pid: int) -> list[Any]:
    """Return the sockets of a process and of its children."""
    watcher = psutil.Process(pid)
    return [
        each
        for process in (watcher, *watcher.children(recursive=True))
        for each in process.net_connections("all")
    ]


@pytest.mark.parametrize(("how", "workers"), [(FAST, "1"), (IMMEDIATE, "2")])
def test_it_says_so_once_and_goes_on(server: Server, how: signal.Signals, workers: str) -> None:
    arguments = ("warehouse.deliver", "--watch", "0.2", "--listen", "--workers", workers)
    # Both ends of the pipe to each worker are sockets, too.
    pipes = 2 * int(workers) if workers != "1" else 0
    server.parcel()
    with watching(*arguments, DATABASE_URL=server.url) as watcher:
        watcher.says("warehouse.deliver: 1 processed in ")
        assert len(connections_of(watcher.process.pid)) > pipes
        server.stop(how)
        said = [watcher.says(GONE, err=True)]
        # A worker that noticed it only when the server is back would tell of it a second time.
        until(
            lambda: len(connections_of(watcher.process.pid)) == pipes, "every worker to notice it"
        )
        time.sleep(1.5)  # it tries several times, and tells of each cause once
        server.start()
        server.parcel()
        while not re.fullmatch(AGAIN, line := watcher.says("warehouse.deliver: ", err=True)):
            said.append(line)
        # That it is going, has gone, and is coming back.
        assert len(said) == len(set(said)) <= 4
        server.wait_until_sent()
        code, _, err = watcher.end()
    assert code == 0
    # The other worker may have met it only as it was coming back.
    assert re.fullmatch(rf"(({AGAIN}|{re.escape(BACK)}.*)\n)*", err), err


def test_the_row_at_hand_is_handled_anew(server: Server, gate: Path) -> None:
    server.parcel("gate")
    arguments = ("warehouse.deliver", "--watch", "0.2")
    with watching(*arguments, DATABASE_URL=server.url, GATE=str(gate)) as watcher:
        at_gate(gate)
        server.stop(FAST)
        (gate / "open").touch()
        said = watcher.says("warehouse.deliver: row ", err=True)
        server.start()
        server.parcel()
        server.wait_until_sent()
        code, out, err = watcher.end()
    # The run did not end by it, and the row is reported like any other that failed.
    assert " failed: OperationalError: " in said
    assert code == 0
    # Looks in between: it is gone, is coming back, and the processor runs again.
    lines = err.splitlines()
    assert len(lines) != 1, err
    assert len(lines) == len(set(lines)) <= 4, err
    assert "2 processed" in out or out.count("1 processed") == 2


def test_a_lost_server_makes_no_worker_a_dead_one(server: Server, tmp_path: Path) -> None:
    """A restart would not help: the health file is written again and again."""
    file = tmp_path / "health.json"
    arguments = ("warehouse.deliver", "--watch", "0.2", "--workers", "2")
    server.parcel()
    with watching(*arguments, "--health-file", str(file), DATABASE_URL=server.url) as watcher:
        watcher.says("warehouse.deliver: 1 processed in ")
        server.stop(IMMEDIATE)
        watcher.says(GONE, err=True)
        for _ in range(6):
            wait_until_written_again(file)
        until(lambda: alive.main([str(file), "--max-age", "2"]) == 0, "a fresh file")
        server.start()
        server.parcel()
        server.wait_until_sent()
        assert watcher.end()[0] == 0
