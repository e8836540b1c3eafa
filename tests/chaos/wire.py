"""A TCP wire whose ends may lose each other without a word, as when a firewall forgets them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.waiting import PATIENCE

T = TypeVar("T")

#: Closing a socket that has this set sends a reset, and no orderly end.
_RESET = struct.pack("ii", 1, 0)


class Wire:
    """Carries connections from a port of this machine to a server's socket."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._wires: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    def open(self) -> None:
        self._thread.start()
        self._do(self._listen())

    def close(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def fall_silent(self) -> list[_Connection]:
        """Stop to forward what half of the connections say, and close none."""
        return self._do(self._fall_silent())

    def reset(self, wires: list[_Connection]) -> None:
        """Reset the clients' ends; the server's ends are still open, and know nothing."""
        self._do(self._reset(wires))

    def end(self, wires: list[_Connection]) -> None:
        """Let the server see that the client has gone."""
        self._do(self._end(wires))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, server = await asyncio.open_unix_connection(str(self._server))
        except OSError:
            writer.transport.abort()
            return
        wire = _Connection(writer, server)
        self._wires.add(wire)
        await wire.carry(reader, answers)
        self._wires.discard(wire)

    async def _fall_silent(self) -> list[_Connection]:
        chosen = list(self._wires)[::2]
        for wire in chosen:
            wire.flows.clear()
        return chosen

    async def _reset(self, wires: list[_Connection]) -> None:
        for wire in wires:
            wire.reset()

    async def _end(self, wires: list[_Connection]) -> None:
        for wire in wires:
            wire.flows.set()

    async def _close(self) -> None:
        self._listener.close()
        for wire in list(self._wires):
            wire.reset()
            wire.flows.set()
        while self._wires:
            await asyncio.sleep(0.01)


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.flows = asyncio.Event()
        self.flows.set()
        self._client = client
        self._server = server
        self._is_reset = False

    async def carry(self, asked: asyncio.StreamReader, answered: asyncio.StreamReader) -> None:
        ways = [
            asyncio.create_task(self._one_way(asked, self._server)),
            asyncio.create_task(self._one_way(answered, self._client)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._client.transport.abort()
        self._server.transport.abort()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while message := await self._next(reader):
                await self.flows.wait()
                if self._is_reset:
                    return  # what was under way is lost
                writer.write(message)
                await writer.drain()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(65536)
        finally:
            # The other side does not learn of an end, either.
            await self.flows.wait()

    def reset(self) -> None:
        self._is_reset = True
        end: socket.socket | None = self._client.transport.get_extra_info("socket")
        if end is not None and end.fileno() >= 0:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._client.transport.abort()


@contextmanager
def opened(server: Path) -> Iterator[Wire]:
    wire = Wire(server)
    wire.open()
    try:
        yield wire
    finally:
        wire.close()
