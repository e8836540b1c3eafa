"""Make the database, measure, and drop it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable

import django
import psycopg

from sample_app.embedded import database_url
from tests.production.figures import broker, pools, tables, workers

# Two at once share the server, never a database.
NAME = f"dcl_figures_{secrets.token_hex(4)}"

FIGURES: dict[str, Callable[[], None]] = {
    "index": tables.measure_index,
    "flips": tables.measure_flips,
    "vacuum": tables.measure_vacuum,
    "pgbouncer": pools.measure_pgbouncer,
    "connections": pools.measure_connections,
    "pool": pools.measure_pool_of_two,
    "workers": workers.measure_copies,
    "broker": broker.measure_broker,
}


def main(names: list[str]) -> None:
    os.environ["DATABASE_URL"] = database_url(NAME)
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", run_syncdb=True, verbosity=0)
    try:
        for name in names or FIGURES:
            print(f"{name}: {FIGURES[name].__doc__}")
            FIGURES[name]()
    finally:
        connections.close_all()
        parameters = connections["default"].get_connection_params()
        login = {key: parameters[key] for key in ("host", "port", "user")}
        with psycopg.connect(**login, dbname="postgres", autocommit=True) as own:
            own.execute(f"DROP DATABASE {NAME} WITH (FORCE)")


if __name__ == "__main__":
    main(sys.argv[1:])
