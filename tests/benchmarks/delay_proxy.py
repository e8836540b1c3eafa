"""A process that delays what a client and PostgreSQL send each other, as a network would.

    python -m tests.benchmarks.delay_proxy SERVER PORT DELAY LIFETIME

Each chunk leaves half of ``DELAY`` (seconds of a round trip) after it arrived, however many are
under way: nothing waits for the chunk before it, so the delay costs no throughput. One thread does
everything, so chunks keep their order. It needs only the standard library.

Timers are late by more than a tenth of a millisecond. So it sleeps in ``select()``, whose timeout
is in microseconds, until ``SPIN`` before a chunk is due, and then polls without sleeping; up to
one processor is busy while a chunk is under way.

The first line that it writes is the folder of its socket. After that it answers each byte that it
reads with a line of JSON, the counts so far. It ends, and removes the folder, when its standard
input ends, as it does with the process that started it, or after ``LIFETIME`` seconds.
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

from tests.benchmarks.protocol import Answers, Counts, Requests

SPIN = 0.0003  # seconds; more than a timer is late on a machine with little to do
CHUNK = 256 * 1024
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
        self.is_blocked = False  # the target takes no more at the moment
        self.has_ended = False
        self._delay, self._count = delay, count
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._is_open = True

    @property
    def reads(self) -> bool:
        return self._is_open and self._bytes < MOST

    @property
    def due(self) -> float | None:
        """Return when there is something to do, if no message of the kernel's is waited for."""
        return self._chunks[0][0] if self._chunks and not self.is_blocked else None

    def read(self) -> None:
        due = monotonic() + self._delay
        try:
            chunk = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        self._is_open = bool(chunk)
        self._count(chunk)
        self._bytes += len(chunk)
        # An empty one stands for the end.
        self._chunks.append((due, chunk))

    def forward(self) -> None:
        """Send what is due."""
        self.is_blocked = False
        while self._chunks and self._chunks[0][0] <= monotonic():
            due, chunk = self._chunks.popleft()
            if not chunk:
                self.has_ended = True
                self.target.shutdown(socket.SHUT_WR)
                return
            try:
                sent = self.target.send(chunk)
            except BlockingIOError:
                sent = 0
            self._bytes -= sent
            if sent < len(chunk):
                self._chunks.appendleft((due, chunk[sent:]))
                self.is_blocked = True
                return


class Proxy:
    """All connections of one listener."""

    def __init__(
        self, listener: socket.socket, server: Path | tuple[str, int], delay: float
    ) -> None:
        self._listener, self._server, self._half = listener, server, delay / 2
        self._links: list[tuple[_Direction, _Direction]] = []
        self._counts = Counts()

    def serve(self, lifetime: float) -> None:
        """Carry what comes until standard input ends, or the lifetime does."""
        end = monotonic() + lifetime
        while (now := monotonic()) < end and self._turn(end - now):
            pass

    def _turn(self, longest: float) -> bool:
        both = [direction for link in self._links for direction in link]
        sources = {each.source: each for each in both if each.reads}
        blocked = [each.target for each in both if each.is_blocked]
        soonest = min((each.due for each in both if each.due is not None), default=None)
        if soonest is not None:
            longest = max(min(longest, soonest - monotonic() - SPIN), 0.0)
        waited_for: list[Any] = [*sources, self._listener, _STDIN]
        ready, _, _ = select.select(waited_for, blocked, [], longest)
        for one in ready:
            if one in sources:
                self._do(sources[one], sources[one].read)
            elif one is self._listener:
                self._accept()
            elif not self._tell():
                return False
        for each in both:
            self._do(each, each.forward)
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
        there = _Direction(client, server, self._half, Requests(self._counts).feed)
        back = _Direction(server, client, self._half, Answers(self._counts).feed)
        self._links.append((there, back))

    def _tell(self) -> bool:
        asked = os.read(_STDIN, 1)
        if asked:
            os.write(_STDOUT, json.dumps(asdict(self._counts)).encode() + b"\n")
        return bool(asked)

    def _do(self, direction: _Direction, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError:
            # One end has hung up: what is under way reaches nobody.
            for link in self._links:
                if direction in link:
                    for each in link:
                        each.has_ended = True

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
    host, port, delay, lifetime = arguments
    name = f".s.PGSQL.{port}"
    server = Path(host) / name if host.startswith("/") else (host, int(port))
    with (
        tempfile.TemporaryDirectory(prefix="dcl-delay-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{folder}/{name}")
        listener.listen()
        os.write(_STDOUT, f"{folder}\n".encode())
        Proxy(listener, server, float(delay)).serve(float(lifetime))


if __name__ == "__main__":
    main(sys.argv[1:])
