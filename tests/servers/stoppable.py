"""A PostgreSQL of its own, which may be stopped in any way, and started again."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from sample_app import embedded, supervisor
from tests.waiting import PATIENCE, until

NAME = "own"
USER = "postgres"
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT  # what pg_ctl sends


@dataclass(frozen=True)
class Server:
    """A server, by the folder that it lives in."""

    home: Path

    @property
    def folder(self) -> Path:
        """The folder of its socket."""
        return self.home / "data"

    @property
    def database(self) -> dict[str, Any]:
        """Django's settings that lead straight to it."""
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": NAME,
            "USER": USER,
            "HOST": str(self.folder),
            "PORT": str(supervisor.PORT),
            "OPTIONS": {"connect_timeout": 5},
        }

    def start(self) -> str:
        """Start it, unless it runs; return the URL."""
        return embedded.database_url(NAME, home=self.home)

    def stop(self, how: signal.Signals) -> None:
        pid = int((self.folder / "postmaster.pid").read_text().split("\n", 1)[0])
        os.kill(pid, how)
        until(lambda: not supervisor.is_locked(self.home / "supervisor.lock"), "its end")

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """Open a session of the test's own."""
        return psycopg.connect(
            host=str(self.folder),
            port=supervisor.PORT,
            user=USER,
            dbname=NAME,
            autocommit=autocommit,
            application_name="monkey",
            connect_timeout=10,
        )

    def ask(self, sql: Any, *arguments: object) -> list[Any]:
        """Execute a statement; ask again when the server is full, or gone for a while."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                with self.connect() as session:
                    cursor = session.execute(sql, arguments or None)
                    return cursor.fetchall() if cursor.description else []
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


@contextmanager
def started() -> Iterator[Server]:
    """Start a server in a short folder that its user may enter when root runs this."""
    with tempfile.TemporaryDirectory(prefix="dcl") as name:
        folder = Path(name)
        folder.chmod(0o711)
        server = Server(folder / "pg")
        try:
            server.start()
            yield server
        finally:
            os.close(embedded._in_use.pop(server.home))
            embedded.remove(server.home)
            shutil.rmtree(server.home, ignore_errors=True)
