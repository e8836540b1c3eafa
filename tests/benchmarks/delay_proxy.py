"""A process that delays what clients and PostgreSQL send each other, as a network does.

    python -m tests.benchmarks.delay_proxy SERVER PORT DELAY

A round trip through it takes ``DELAY`` seconds longer, half of them in each direction. Clients
connect to a Unix socket, where nothing waits for larger packets.

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
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.protocol import Conversation, Counts, EncryptedError
from tests.servers.wire import Address, Wire, carrying

_STDIN, _STDOUT, _STDERR = range(3)


class Delayed(Wire):
    """A wire that holds up each message, and counts into an entry of its own."""

    def __init__(
        self, delay: float, counted: list[Counts], server: Address, client: socket.socket
    ) -> None:
        super().__init__(client, server)
        self._half = delay / 2
        counted.append(counts := Counts())
        self._conversation = Conversation(counts)

    def asks(self, message: bytes) -> bool:
        self._conversation.request(message)
        return self._has_come(message)

    def answers(self, message: bytes) -> bool:
        try:
            self._conversation.answer(message)
        except EncryptedError as error:
            os.write(_STDERR, f"The delay proxy: {error}\n".encode())
            os._exit(1)
        return self._has_come(message)

    def _has_come(self, message: bytes) -> bool:
        if message and self._half:
            time.sleep(self._half)
        return bool(message)


def main(arguments: Sequence[str]) -> None:
    host, port, delay = arguments
    name = f".s.PGSQL.{port}"
    server: Address = Path(host) / name if host.startswith("/") else (host, int(port))
    counted: list[Counts] = []
    known = Counts()
    with (
        tempfile.TemporaryDirectory(prefix="dcl-delay-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(f"{folder}/{name}")
        with carrying(listener, partial(Delayed, float(delay), counted, server)):
            os.write(_STDOUT, f"{folder}\n".encode())
            while os.read(_STDIN, 1):
                total = Counts(
                    sum(each.messages for each in counted), sum(each.statements for each in counted)
                )
                new = {
                    "messages": total.messages - known.messages,
                    "statements": total.statements - known.statements,
                }
                known = total
                os.write(_STDOUT, json.dumps(new).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
