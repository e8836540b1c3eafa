"""The test database, for processes that tests start and for sessions with other settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from django.db import connection, connections

from tests.environments import CHECKOUT


def database_url(name: str = "") -> str:
    """Return the URL of the test database, which the settings' own URL does not name.

    ``name``: of another database on its server.
    """
    config = connection.settings_dict
    name = name or str(config["NAME"])
    if connection.vendor == "sqlite":
        return f"sqlite:///{name}"
    scheme = {"postgresql": "postgres", "mysql": "mysql"}[connection.vendor]
    login = f"{quote(config['USER'])}:{quote(config['PASSWORD'])}".removesuffix(":")
    host, port = config["HOST"], config["PORT"]
    if socket := config["OPTIONS"].get("unix_socket"):
        return f"{scheme}://{login}@{host}/{name}?unix_socket={socket}"
    if host.startswith("/"):
        return f"{scheme}://{login}@:{port}/{quote(host)}/{name}"
    return f"{scheme}://{login}@{host}:{port}/{name}"


def environment(**variables: str) -> dict[str, str]:
    """Return the variables for a command on the test database."""
    return {
        **os.environ,
        "DATABASE_URL": database_url(),
        "DJANGO_SETTINGS_MODULE": "tests.warehouse.settings",
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONWARNINGS": "error",
        "COLUMNS": "100",
        **variables,
    }


@contextmanager
def alias(name: str, **changes: Any) -> Iterator[str]:
    """Add a database to those of the settings."""
    connections.databases[name] = {**connections.databases["default"], **changes}
    try:
        yield name
    finally:
        connections[name].close()
        del connections[name], connections.databases[name]


@contextmanager
def other(**changes: Any) -> Iterator[None]:
    """Have the alias ``other`` connect with other settings."""
    wrapper = connections["other"]
    before = wrapper.settings_dict
    wrapper.close()
    wrapper.settings_dict = {**before, **changes}
    try:
        yield
    finally:
        wrapper.close()
        wrapper.settings_dict = before
