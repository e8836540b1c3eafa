"""A database of its own for one run of the benchmarks, and what its server says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from sample_app import embedded, supervisor
from tests.servers.scratch import scratch

#: What decides how long a commit takes, and on what.
SETTINGS = ("fsync", "synchronous_commit", "full_page_writes", "wal_level", "shared_buffers")


@contextmanager
def database(*, fsync: bool) -> Iterator[None]:
    """Make an empty database, name it in DATABASE_URL, and drop it in the end.

    On the server of DATABASE_URL, or on an embedded one that no other process uses.
    """
    with _server(fsync=fsync) as server, scratch(server, "dcl_bench") as url:
        os.environ["DATABASE_URL"] = url
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
        yield


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
