"""A real HTTP server in a thread of this process, in the place of another company's service."""

from __future__ import annotations

import json
import sys
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request."""

    method: str
    path: str
    headers: Message
    body: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the client."""

    status: int
    body: Any


class HttpStub(ABC):
    """Serve on a free port for as long as the `with` block lasts."""

    def __init__(self) -> None:
        self.closing = threading.Event()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"http://{HOST}:{self._server.server_port}"

    @abstractmethod
    def answer(self, request: Request) -> Answer | None:
        """Answer a request, in its connection's thread; None: hang up without an answer."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 would refuse workers that connect all at once

    def __init__(self, stub: HttpStub) -> None:
        self.stub = stub
        super().__init__((HOST, 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have gone, because some are killed on purpose."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # so that a connection serves many requests
    disable_nagle_algorithm = True  # it would delay every answer by 40 ms
    server: _Server

    def _respond(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(content) if content else None
        answer = self.server.stub.answer(Request(self.command, self.path, self.headers, body))
        if answer is None:
            self.close_connection = True
            return
        content = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _respond  # noqa: N815 - the names are http.server's

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - likewise
        """Write no access log between the lines of the demo."""
