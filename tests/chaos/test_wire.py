"""The wire falls silent without a word, and its two ends learn of it one after the other."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos import wire
from tests.waiting import PATIENCE

SOON = 0.2  # seconds in which nothing is to come


@contextmanager
def connected() -> Iterator[tuple[wire.Wire, socket.socket, socket.socket]]:
    """Give a wire, its client and its server, which have met."""
    with (
        tempfile.TemporaryDirectory(prefix="wire") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(PATIENCE)
        with (
            wire.opened(path) as opened,
            socket.create_connection(("127.0.0.1", opened.port), PATIENCE) as client,
        ):
            server, _ = listener.accept()
            server.settimeout(PATIENCE)
            with server:
                client.sendall(b"question")
                assert server.recv(99) == b"question"
                server.sendall(b"answer")
                assert client.recv(99) == b"answer"
                yield opened, client, server


def hears_nothing(end: socket.socket) -> bool:
    end.settimeout(SOON)
    try:
        end.recv(99)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE)
    return False


def test_the_client_is_reset_and_the_server_learns_of_it_later() -> None:
    with connected() as (opened, client, server):
        silent = opened.fall_silent()
        client.sendall(b"lost")
        assert hears_nothing(server)
        assert hears_nothing(client)
        opened.reset(silent)
        with pytest.raises(ConnectionResetError):
            client.recv(99)
        assert hears_nothing(server)
        opened.end(silent)
        assert server.recv(99) == b""


def test_an_orderly_end_is_carried() -> None:
    with connected() as (_, client, server):
        client.close()
        assert server.recv(99) == b""
