"""A wire between client and server that can be cut in the middle of a statement."""

from __future__ import annotations

import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from django.db import connections

from tests.contract.support.sessions import until_gone
from tests.databases import other
from tests.servers.wire import Address, Wire, carrying
from tests.waiting import wait


@dataclass
class Cut:
    """The first message with these words, once it is armed, is the last one.

    ``forwarded``: the server gets it, and its answer is lost; else it is lost itself.
    """

    words: bytes
    forwarded: bool
    armed: threading.Event = field(default_factory=threading.Event)
    made: threading.Event = field(default_factory=threading.Event)

    def is_here(self, message: bytes) -> bool:
        # Whole words: there are AUTOCOMMIT and READ COMMITTED, too.
        here = re.search(rb"\b" + self.words + rb"\b", message, re.IGNORECASE) is not None
        here = here and self.armed.is_set() and not self.made.is_set()
        if here:
            self.made.set()
        return here


@contextmanager
def cut(words: bytes, *, forwarded: bool = False, armed: bool = True) -> Iterator[Cut]:
    """Put the alias "other" behind a wire that is cut where the words pass."""
    plan = Cut(words, forwarded)
    if armed:
        plan.armed.set()
    with (
        tempfile.TemporaryDirectory(prefix="cut") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        server, here, changes = _detour(Path(folder))
        listener.bind(str(here))
        # A pooler in between may run as another user.
        Path(folder).chmod(0o711)
        here.chmod(0o666)
        with carrying(listener, partial(_Cut, plan, server)), other(**changes):
            yield plan
    assert plan.made.is_set(), f"{words!r} never passed"


def _detour(folder: Path) -> tuple[Address, Path, dict[str, Any]]:
    """Return the server's address, the proxy's, and the settings that lead to the proxy."""
    config = connections["other"].settings_dict
    if connections["other"].vendor == "mysql":
        here = folder / "socket"
        server = Path(config["OPTIONS"]["unix_socket"])
        return server, here, {"OPTIONS": {**config["OPTIONS"], "unix_socket": str(here)}}
    name = f".s.PGSQL.{config['PORT'] or 5432}"
    host = config["HOST"] or "localhost"
    changes = {"HOST": str(folder)}
    if host.startswith("/"):
        return Path(host) / name, folder / name, changes
    return (host, int(config["PORT"] or 5432)), folder / name, changes


class _Cut(Wire):
    """A wire that is cut by the plan."""

    def __init__(self, plan: Cut, server: Address, client: socket.socket) -> None:
        super().__init__(client, server)
        self._plan = plan
        self._answer_is_lost = False
        self._server_has_gone = threading.Event()
        #: The number of MariaDB's session.
        self._session: int | None = None

    def asks(self, message: bytes) -> bool:
        if not message or not self._plan.is_here(message):
            return bool(message)
        if self._plan.forwarded:
            self._answer_is_lost = True
        else:
            # The session has ended, and let go of its locks, before the client hears of it: who
            # comes first otherwise is a matter of luck.
            self.server.shutdown(socket.SHUT_WR)
            wait(self._server_has_gone, "the server to notice that its client has hung up")
            if self._session is not None:
                until_gone(self._session)
        return self._answer_is_lost

    def answers(self, message: bytes) -> bool:
        if not message:
            self._server_has_gone.set()
        elif self._session is None and connections["other"].vendor == "mysql":
            # The first message: its length and number, the protocol, the version, the session.
            end = message.index(b"\0", 5) + 1
            self._session = int.from_bytes(message[end : end + 4], "little")
        return bool(message) and not self._answer_is_lost
