"""A TCP wire whose ends may lose each other without a word, as when a firewall forgets them."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tests.servers.wire import Wire, carrying

#: Closing a socket that has this set sends a reset, and no orderly end.
_RESET = struct.pack("ii", 1, 0)


class _Silent(Wire):
    """A wire that may fall silent: nothing passes, and no side learns of the other's end."""

    def __init__(self, among: set[_Silent], server: Path, client: socket.socket) -> None:
        super().__init__(client, server)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.flows = threading.Event()
        self.flows.set()
        self._is_reset = False
        self._among = among

    def carry(self) -> None:
        self._among.add(self)
        super().carry()
        self._among.discard(self)

    def asks(self, message: bytes) -> bool:
        self.flows.wait()
        return bool(message) and not self._is_reset  # what was under way is lost

    answers = asks

    def reset(self) -> None:
        self._is_reset = True
        with suppress(OSError):  # it has ended
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # The thread that reads keeps the socket open; to end its wait sends nothing.
            self.client.shutdown(socket.SHUT_RD)
        self.client.close()


class Wires:
    """The wires from a port of this machine to a server's socket."""

    def __init__(self, port: int, laid: set[_Silent]) -> None:
        self.port = port
        self._laid = laid

    def fall_silent(self) -> list[_Silent]:
        """Stop to forward what half of the connections say, and close none."""
        chosen = [*self._laid.copy()][::2]
        for each in chosen:
            each.flows.clear()
        return chosen

    def reset(self, wires: Sequence[_Silent]) -> None:
        """Reset the clients' ends; the server's ends are still open, and know nothing."""
        for each in wires:
            each.reset()

    def end(self, wires: Sequence[_Silent]) -> None:
        """Let the server see that the client has gone."""
        for each in wires:
            each.flows.set()


@contextmanager
def opened(server: Path) -> Iterator[Wires]:
    laid: set[_Silent] = set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with carrying(listener, partial(_Silent, laid, server)):
            yield Wires(listener.getsockname()[1], laid)
        for each in laid.copy():
            each.reset()
            each.flows.set()
