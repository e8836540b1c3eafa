"""A database of its own for one run of the benchmarks, and what its server says of itself."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from sample_app import embedded, supervisor

#: What decides how long a commit takes, and on what.
SETTINGS = ("fsync", "synchronous_commit", "full_page_writes", "wal_level", "shared_buffers")


@contextmanager
def database(*, fsync: bool) -> Iterator[None]:
    """Make an empty database, name it in DATABASE_URL, and drop it in the end.

    On the server of DATABASE_URL, or on an embedded one that no other process uses.
    """
    name = f"dcl_bench_{secrets.token_hex(4)}"
    with _server(fsync=fsync) as server:
        base, _, _ = server.rpartition("/")
        _execute(server, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        os.environ["DATABASE_URL"] = f"{base}/{name}"
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
        try:
            yield
        finally:
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            _execute(server, drop)


@contextmanager
def _server(*, fsync: bool) -> Iterator[str]:
    if given := os.environ.get("DATABASE_URL"):
        yield given
        return
    default = embedded.default_home()
    # Not the server of the demo and the tests, which does without fsync and may be in use; nor
    # that of another run of the benchmarks, since the run that ends first removes it.
    home = default.with_name(f"{default.name}-{os.getpid()}")
    os.environ[supervisor.FSYNC] = "on" if fsync else "off"
    try:
        yield embedded.database_url("postgres", home=home)
    finally:
        os.close(embedded._in_use.pop(home))
        embedded.remove(home)


def _execute(url: str, statement: sql.Composed) -> None:
    import environ

    given = environ.Env.db_url_config(url)
    with psycopg.connect(
        dbname=given["NAME"],
        user=given["USER"],
        password=given["PASSWORD"],
        host=given["HOST"],
        port=given["PORT"] or None,
        autocommit=True,
    ) as connection:
        connection.execute(statement)


def describe() -> dict[str, str]:
    """Return what a reader has to know of the server and the machine."""
    import platform

    import django
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT version()")
        ((version,),) = cursor.fetchall()
        cursor.execute(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s)",
            [list(SETTINGS)],
        )
        settings = dict(cursor.fetchall())
    return {
        "server": version.split(" on ")[0],
        **{name: settings[name] for name in SETTINGS},
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "processors": str(os.cpu_count()),
        **{
            f"load before, {minutes} min": f"{load:.1f}"
            for minutes, load in zip((1, 5, 15), os.getloadavg(), strict=True)
        },
    }
