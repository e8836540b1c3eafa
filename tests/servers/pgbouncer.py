"""A private PgBouncer from the binary of Debian's ``pgbouncer``, before a PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from .software import Software

# The embedded PostgreSQL runs as the same user, and its socket is for that one only.
SOFTWARE = Software("PgBouncer", ("pgbouncer",), package="pgbouncer", user="nobody")
is_installed = SOFTWARE.is_installed

PORT = 6432  # of the socket's name alone


@contextmanager
def pgbouncer(
    database: Mapping[str, Any], *, mode: str, **settings: object
) -> Iterator[dict[str, Any]]:
    """Run a PgBouncer before one of Django's ``DATABASES``; give the same, as seen through it.

    ``mode``: "session", "transaction" or "statement". ``settings``: others of its configuration.
    """
    [server] = SOFTWARE.find()
    with SOFTWARE.folder() as folder:
        config = folder / "pgbouncer.ini"
        behind = f"host={database['HOST']} port={database['PORT']} user={database['USER']}"
        lines = {
            "unix_socket_dir": folder,
            "listen_port": PORT,
            "auth_type": "any",
            "pool_mode": mode,
            **settings,
        }
        config.write_text(
            f"[databases]\n* = {behind}\n[pgbouncer]\n"
            + "".join(f"{key} = {value}\n" for key, value in lines.items())
        )
        with SOFTWARE.serving(
            folder, server, str(config), is_ready=lambda: _answers(folder, database["USER"])
        ):
            yield {**database, "HOST": str(folder), "PORT": str(PORT)}


def _answers(folder: Path, user: str) -> bool:
    try:
        # Its own console, so that no connection to PostgreSQL is opened for the question.
        psycopg.connect(
            host=str(folder), port=PORT, user=user, dbname="pgbouncer", autocommit=True
        ).close()
    except psycopg.OperationalError:
        return False
    return True
