"""A watcher outlives its database server, which is really stopped and started."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil
import pytest

from tests.edge.manage import python
from tests.edge.watchers import watching
from tests.servers.stoppable import FAST, IMMEDIATE, Server, started
from tests.waiting import until

GONE = "warehouse.deliver: the database reported: "
AGAIN = "warehouse.deliver: runs again"


PENDING = "SELECT count(*) FROM tests_parcel WHERE NOT sent"


class Parcels(NamedTuple):
    """A PostgreSQL of this module's own, and the parcels in it."""

    server: Server
    url: str

    def add(self, note: str = "") -> None:
        self.server.ask(
            "INSERT INTO tests_parcel (sent, tries, priority, note) VALUES (false, 0, 0, %s)", note
        )

    def wait_until_sent(self) -> None:
        until(lambda: self.server.ask(PENDING) == [(0,)], "the parcels to be sent")


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    """Start the server, and make the tables."""
    with started() as server:
        # It checks the pages of the shop, too, which need the apps of the admin.
        settings = {"DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": server.start()}
        migrate = "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"
        assert python(*migrate, **settings).returncode == 0
        yield server


@pytest.fixture
def parcels(module_server: Server) -> Parcels:
    url = module_server.start()
    module_server.ask("DELETE FROM tests_parcel")
    return Parcels(module_server, url)


def connections_of(pid: int) -> list[Any]:
    """Return the sockets of a process."""
    return [*psutil.Process(pid).net_connections("all")]


@pytest.mark.parametrize("how", [FAST, IMMEDIATE])
def test_it_says_so_once_and_goes_on(parcels: Parcels, how: signal.Signals) -> None:
    arguments = ("warehouse.deliver", "--watch", "0.2", "--listen")
    parcels.add()
    with watching(*arguments, DATABASE_URL=parcels.url) as watcher:
        watcher.says("warehouse.deliver: 1 processed in ")
        assert connections_of(watcher.process.pid)
        parcels.server.stop(how)
        said = [watcher.says(GONE, err=True)]
        # If it noticed it only when the server is back it would tell of it a second time.
        until(lambda: not connections_of(watcher.process.pid), "the watcher to notice it")
        time.sleep(1.5)  # it tries several times, and tells of each cause once
        parcels.server.start()
        parcels.add()
        while (line := watcher.says("warehouse.deliver: ", err=True)) != AGAIN:
            said.append(line)
        # That it is going, has gone, and is coming back.
        assert len(said) == len(set(said)) <= 4
        parcels.wait_until_sent()
        code, _, err = watcher.end()
    assert code == 0
    assert err == ""
