"""A process that delays what clients and PostgreSQL send each other, as a network does.

    python -m tests.benchmarks.delay_proxy SERVER PORT DELAY

A round trip through it takes ``DELAY`` seconds longer: each chunk is sent on half of that after it
arrived, in either direction. No chunk waits for the one before, so the delay does not limit the
throughput. Clients connect to a Unix socket, where nothing waits for larger packets.

The first line that the proxy writes is the folder of its socket. After that it answers each byte
of its standard input with a line of JSON: what it has counted since the last answer. It removes
the folder and ends when its standard input ends, which the end of the parent process does, too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep

from tests.servers.wire import Address, Wire, carrying

from .protocol import Conversation, Counts, EncryptedError

#: Seconds: more than a timer is late on a machine with little to do. The rest is waited for
#: without sleeping, so that one processor is busy while a chunk is under way.
SPIN = 0.0003

_STDIN, _STDOUT = 0, 1
_counting = threading.Lock()


class _Delaying(Wire):
    """A wire on which each chunk arrives later, and is counted then."""

    def __init__(self, counts: Counts, half: float, server: Address, client: socket.socket) -> None:
        super().__init__(client, server)
        self._half = half
        self._conversation = Conversation(counts)

    def _one_way(
        self, source: socket.socket, target: socket.socket, may_pass: Callable[[bytes], bool]
    ) -> None:
        # Each chunk with the time at which it is due; an empty one is the end.
        chunks = SimpleQueue[tuple[float, bytes]]()
        read = threading.Thread(target=self._read, args=(source, chunks), daemon=True)
        read.start()
        with suppress(OSError):
            while True:
                due, chunk = chunks.get()
                sleep(max(0.0, due - monotonic() - SPIN))
                while monotonic() < due:
                    sleep(0)
                if not chunk:
                    break
                target.sendall(chunk)
                # After it was sent: the delay does not include the time for counting.
                with _counting:
                    may_pass(chunk)
        self.hang_up()

    def _read(self, source: socket.socket, chunks: SimpleQueue[tuple[float, bytes]]) -> None:
        chunk = b"..."
        while chunk:
            try:
                chunk = source.recv(256 * 1024)
            except OSError:
                chunk = b""  # a source that was reset has ended; what it sent before still arrives
            chunks.put((monotonic() + self._half, chunk))

    def asks(self, message: bytes) -> bool:
        self._conversation.request(message)
        return True

    def answers(self, message: bytes) -> bool:
        try:
            self._conversation.answer(message)
        except EncryptedError as error:
            os.write(2, f"The delay proxy: {error}\n".encode())
            os._exit(1)
        return True


def main(arguments: Sequence[str]) -> None:
    host, port, delay = arguments
    name = f".s.PGSQL.{port}"
    server = Path(host) / name if host.startswith("/") else (host, int(port))
    counts = Counts()
    with (
        tempfile.TemporaryDirectory(prefix="dcl-delay-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{folder}/{name}")
        with carrying(listener, partial(_Delaying, counts, float(delay) / 2, server)):
            os.write(_STDOUT, f"{folder}\n".encode())
            while os.read(_STDIN, 1):
                with _counting:
                    os.write(_STDOUT, json.dumps(asdict(counts)).encode() + b"\n")
                    counts.messages = counts.commits = counts.statements = 0


if __name__ == "__main__":
    main(sys.argv[1:])
