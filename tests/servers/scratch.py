"""An empty database of one test's own, on any PostgreSQL."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from environ import Env
from psycopg import sql


@contextmanager
def scratch(server: str, name: str) -> Iterator[str]:
    """Make a database beside the one that the URL names, give its URL, and drop it in the end."""
    name = f"{name}_{secrets.token_hex(4)}"
    quoted = sql.Identifier(name)
    with connect(server) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(quoted))
        try:
            yield f"{server.rpartition('/')[0]}/{name}"
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(quoted))


def connect(url: str) -> psycopg.Connection[tuple[Any, ...]]:
    config = Env.db_url_config(url)
    return psycopg.connect(
        host=config["HOST"],
        port=config["PORT"] or None,
        user=config["USER"],
        password=config["PASSWORD"] or None,
        dbname=config["NAME"],
        autocommit=True,
    )
