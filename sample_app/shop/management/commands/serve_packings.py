"""The shop's server for robots that run on the same machine: manage.py serve_packings."""

from __future__ import annotations

from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from django.core.management.base import BaseCommand
from django.core.wsgi import get_wsgi_application

from dcl_processor.signals import row_finished

HOST = "127.0.0.1"


class Command(BaseCommand):
    """Serve what the robots call, for the demo."""

    help = (
        "Serve the robots' calls on a free port, for the demo. Prints the port, and then the key "
        "and the outcome of each packing when its robot has settled it."
    )

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Serve until the process is ended."""
        row_finished.connect(self._print)
        with _Server((HOST, 0), _Handler) as server:
            server.set_app(get_wsgi_application())
            self.stdout.write(f"{server.server_port}")
            self.stdout.flush()
            server.serve_forever()

    def _print(self, *, pk: int, outcome: str, **_: Any) -> None:
        self.stdout.write(f"{pk} {outcome}")
        self.stdout.flush()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore robots that have gone, because some are killed on purpose."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in http.server
        """Write no access log between the lines for the demo."""
