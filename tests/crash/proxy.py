"""A wire between client and server that can be cut in the middle of a statement."""

from __future__ import annotations

import re
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connections

from tests.contract.support.sessions import until_gone
from tests.waiting import wait


@dataclass
class Cut:
    """The first message with these words, once it is armed, is the last one.

    ``forwarded``: the server gets it, and its answer is lost; else it is lost itself. ``silent``:
    it is lost, and until the end neither side learns of it, as if a machine had lost its network.
    """

    words: bytes
    forwarded: bool
    silent: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    armed: threading.Event = field(default_factory=threading.Event)
    made: threading.Event = field(default_factory=threading.Event)

    def _words(self, message: bytes) -> bool:
        # Whole words: there are AUTOCOMMIT and READ COMMITTED, too.
        return re.search(rb"\b" + self.words + rb"\b", message, re.IGNORECASE) is not None

    def is_here(self, message: bytes) -> bool:
        here = self.armed.is_set() and not self.made.is_set() and self._words(message)
        if here:
            self.made.set()
        return here


@contextmanager
def cut(
    words: bytes, *, forwarded: bool = False, silent: bool = False, armed: bool = True
) -> Iterator[Cut]:
    """Put the alias "other" behind a wire that is cut where the words pass."""
    plan = Cut(words, forwarded, silent)
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
        listener.listen()
        serving = threading.Thread(target=_serve, args=(listener, server, plan), daemon=True)
        serving.start()
        try:
            with _led(changes):
                yield plan
        finally:
            plan.over.set()
        # Wakes up the thread that waits for the next client.
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()
    assert plan.made.is_set(), f"{words!r} never passed"


@contextmanager
def _led(changes: dict[str, Any]) -> Iterator[None]:
    other = connections["other"]
    before = dict(other.settings_dict)
    other.close()
    other.settings_dict.update(changes)
    try:
        yield
    finally:
        other.close()
        other.settings_dict.update(before)


def _detour(folder: Path) -> tuple[Path | tuple[str, int], Path, dict[str, Any]]:
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


def _serve(listener: socket.socket, server: Path | tuple[str, int], plan: Cut) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_Wire(client, server, plan).carry, daemon=True).start()


class _Wire:
    """One client's connection, carried in both directions until either side hangs up."""

    def __init__(self, client: socket.socket, server: Path | tuple[str, int], plan: Cut) -> None:
        self._client = client
        self._plan = plan
        self._answer_is_lost = False
        self._server_has_gone = threading.Event()
        #: The number of MariaDB's session.
        self._session: int | None = None
        if isinstance(server, Path):
            self._server = socket.socket(socket.AF_UNIX)
            self._server.connect(str(server))
        else:
            self._server = socket.create_connection(server)

    def carry(self) -> None:
        with self._client, self._server:
            back = threading.Thread(target=self._one_way, args=(self._answer,), daemon=True)
            back.start()
            self._one_way(self._ask)
            back.join()

    def _one_way(self, message: Callable[[], bool]) -> None:
        with suppress(OSError):
            while message():
                pass
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> bool:
        message = self._client.recv(65536)
        if message and self._plan.is_here(message):
            if self._plan.silent:
                self._plan.over.wait()
                return False
            if not self._plan.forwarded:
                # The session has ended, and let go of its locks, before the client hears of it:
                # who comes first otherwise is a matter of luck.
                self._server.shutdown(socket.SHUT_WR)
                wait(self._server_has_gone, "the server to notice that its client has hung up")
                if self._session is not None:
                    until_gone(self._session)
                return False
            self._answer_is_lost = True
        self._server.sendall(message)
        return bool(message)

    def _answer(self) -> bool:
        message = self._server.recv(65536)
        if not message:
            self._server_has_gone.set()
        elif self._session is None and connections["other"].vendor == "mysql":
            # The first message: its length and number, the protocol, the version, the session.
            end = message.index(b"\0", 5) + 1
            self._session = int.from_bytes(message[end : end + 4], "little")
        if self._answer_is_lost:
            return False
        self._client.sendall(message)
        return bool(message)
