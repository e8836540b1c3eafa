"""The ways to the database: straight, through two poolers, and by a wire that can fall silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.servers.pgbouncer import pgbouncer
from tests.servers.stoppable import NAME, USER, Server

from . import wire

DIRECT, SESSION, TRANSACTION, WIRE = "direct", "session", "transaction", "wire"
ROUTES = (DIRECT, SESSION, TRANSACTION, WIRE)
POOLED = (SESSION, TRANSACTION)

#: Seconds; PgBouncer's defaults, 15 and 120, would outlast many a restart of the server.
POOLER = {"server_login_retry": 1, "query_wait_timeout": 10, "admin_users": USER}


@dataclass(frozen=True)
class Routes:
    """Django's settings for each route, and what can be done to some of them."""

    databases: Mapping[str, Mapping[str, Any]]
    wire: wire.Wires

    def drop_everybody(self, pooler: str) -> None:
        """Let a pooler drop all of its connections, to clients and to the server."""
        database = self.databases[pooler]
        with psycopg.connect(
            host=database["HOST"],
            port=database["PORT"],
            user=USER,
            dbname="pgbouncer",
            autocommit=True,
        ) as console:
            console.execute(f"KILL {NAME}".encode())
            console.execute(f"RESUME {NAME}".encode())


@contextmanager
def laid(server: Server) -> Iterator[Routes]:
    straight = server.database
    with (
        pgbouncer(straight, mode=SESSION, **POOLER) as session,
        pgbouncer(straight, mode=TRANSACTION, **POOLER) as transaction,
        wire.opened(server.folder / f".s.PGSQL.{straight['PORT']}") as silent,
    ):
        databases = {
            DIRECT: straight,
            SESSION: session,
            # As the documentation says: a cursor of the server's would outlive its transaction.
            TRANSACTION: {**transaction, "DISABLE_SERVER_SIDE_CURSORS": True},
            WIRE: {**straight, "HOST": "127.0.0.1", "PORT": str(silent.port)},
        }
        yield Routes(databases, silent)
