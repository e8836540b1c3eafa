"""A process that delays what clients and PostgreSQL send each other, as a network does.

    python -m tests.benchmarks.delay_proxy SERVER PORT DELAY

A round trip through it takes ``DELAY`` seconds longer: each chunk is sent on half of that after it
arrived, in either direction. No chunk waits for the one before, so the delay does not limit the
throughput. Clients connect to a Unix socket, where nothing waits for larger packets. The proxy
needs only the standard library.

Timers are late by more than a tenth of a millisecond. So the proxy sleeps in ``select()``, whose
timeout is in microseconds, until ``SPIN`` before a chunk is due, and then polls without sleeping:
one processor is busy while a chunk is under way.

The first line that the proxy writes is the folder of its socket. After that it answers each byte
of its standard input with a line of JSON: what it has counted since the last answer. It removes
the folder and ends when its standard input ends, which the end of the parent process does, too.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from tests.benchmarks.protocol import Conversation, Counts, EncryptedError

SPIN = 0.0003  # seconds; more than a timer is late on a machine with little to do
CHUNK = 256 * 1024  # bytes
MOST = 64 * 1024 * 1024  # bytes under way in one direction, after which its sender has to wait

_STDIN, _STDOUT = 0, 1


class _Direction:
    """The bytes from one end of a connection to the other, each chunk with the time it is due."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        delay: float,
        count: Callable[[bytes], None],
    ) -> None:
        self.source, self.target = source, target
        self.is_blocked = False  # the target's buffer is full
        self.has_ended = False
        self._delay, self._count = delay, count
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._size = 0  # bytes of the chunks
        self._is_open = True  # the source may send more

    @property
    def reads(self) -> bool:
        return self._is_open and self._size < MOST

    @property
    def due(self) -> float | None:
        """Return when to forward the next chunk, unless the target has to take one first."""
        return self._chunks[0][0] if self._chunks and not self.is_blocked else None

    def read(self) -> None:
        due = monotonic() + self._delay
        try:
            chunk = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""  # a source that was reset has ended; what it sent before still arrives
        self._is_open = bool(chunk)
        self._size += len(chunk)
        # An empty chunk is the end.
        self._chunks.append((due, chunk))

    def forward(self) -> None:
        """Send what is due."""
        self.is_blocked = False
        try:
            while self._chunks and self._chunks[0][0] <= monotonic() and not self.is_blocked:
                self._send(*self._chunks.popleft())
        except OSError:
            # The target has closed. What it sent before that is still under way to the source:
            # the server's reason for closing, for example.
            self._is_open = False
            self.has_ended = True
            self._chunks.clear()

    def _send(self, due: float, chunk: bytes) -> None:
        if not chunk:
            self.has_ended = True
            self.target.shutdown(socket.SHUT_WR)
            return
        try:
            sent = self.target.send(chunk)
        except BlockingIOError:
            sent = 0
        if sent < len(chunk):
            self._chunks.appendleft((due, chunk[sent:]))
            self.is_blocked = True
        if sent:
            self._size -= sent
            # After it was sent: the delay does not include the time for counting a large result.
            self._count(chunk[:sent])


class Proxy:
    """All connections of one listener."""

    def __init__(
        self, listener: socket.socket, server: Path | tuple[str, int], delay: float
    ) -> None:
        self._listener, self._server, self._half = listener, server, delay / 2
        self._links: list[tuple[_Direction, _Direction]] = []
        self._counts = Counts()

    def serve(self) -> None:
        """Forward until standard input ends."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        directions = [direction for link in self._links for direction in link]
        sources = {each.source: each for each in directions if each.reads}
        blocked = [each.target for each in directions if each.is_blocked]
        soonest = min((each.due for each in directions if each.due is not None), default=None)
        wait = None if soonest is None else max(0.0, soonest - monotonic() - SPIN)
        waited_for: list[Any] = [*sources, self._listener, _STDIN]
        ready, _, _ = select.select(waited_for, blocked, [], wait)
        for one in ready:
            if one in sources:
                sources[one].read()
            elif one is self._listener:
                self._accept()
            elif not self._answer():
                return False
        for each in directions:
            each.forward()
        self._drop_ended()
        return True

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = _connect(self._server)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setblocking(False)
        conversation = Conversation(self._counts)
        there = _Direction(client, server, self._half, conversation.request)
        back = _Direction(server, client, self._half, conversation.answer)
        self._links.append((there, back))

    def _answer(self) -> bool:
        if not os.read(_STDIN, 1):
            return False
        os.write(_STDOUT, json.dumps(asdict(self._counts)).encode() + b"\n")
        self._counts.messages = self._counts.commits = self._counts.statements = 0
        return True

    def _drop_ended(self) -> None:
        for link in [link for link in self._links if all(each.has_ended for each in link)]:
            self._links.remove(link)
            for each in link:
                each.source.close()


def _connect(server: Path | tuple[str, int]) -> socket.socket:
    if isinstance(server, tuple):
        connection = socket.create_connection(server, timeout=10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(str(server))
    return connection


def main(arguments: Sequence[str]) -> None:
    host, port, delay = arguments
    name = f".s.PGSQL.{port}"
    server = Path(host) / name if host.startswith("/") else (host, int(port))
    with (
        tempfile.TemporaryDirectory(prefix="dcl-delay-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{folder}/{name}")
        listener.listen()
        os.write(_STDOUT, f"{folder}\n".encode())
        try:
            Proxy(listener, server, float(delay)).serve()
        except EncryptedError as error:
            sys.exit(f"The delay proxy: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
