"""Wires between clients and a server, which tests cut, or let fall silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Address = Path | tuple[str, int]


class Wire:
    """One client's connection, carried in both directions until either side hangs up.

    A message is passed on if ``asks()`` or ``answers()`` says so; otherwise both sides hang up. The
    empty message is the end.
    """

    def __init__(self, client: socket.socket, server: Address) -> None:
        self.client = client
        if isinstance(server, Path):
            self.server = socket.socket(socket.AF_UNIX)
            self.server.connect(str(server))
        else:
            self.server = socket.create_connection(server)

    def asks(self, message: bytes) -> bool:
        return bool(message)

    answers = asks

    def carry(self) -> None:
        with self.client, self.server:
            answers = self.server, self.client, self.answers
            back = threading.Thread(target=self._one_way, args=answers, daemon=True)
            back.start()
            self._one_way(self.client, self.server, self.asks)
            back.join()

    def _one_way(
        self, source: socket.socket, target: socket.socket, may_pass: Callable[[bytes], bool]
    ) -> None:
        with suppress(OSError):
            while may_pass(message := source.recv(65536)):
                target.sendall(message)
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def carrying(listener: socket.socket, laid: Callable[[socket.socket], Wire]) -> Iterator[None]:
    """Let a wire of its own carry each client of the listener in the block."""

    def carry(client: socket.socket) -> None:
        try:
            wire = laid(client)
        except OSError:  # the server is away
            client.close()
        else:
            wire.carry()

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=carry, args=(client,), daemon=True).start()

    listener.listen()
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield
    finally:
        # Wakes up the thread that waits for the next client.
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
