"""procrastinate: its own worker on its asynchronous driver, with an ``async def`` task."""

from __future__ import annotations

from functools import cache
from typing import Any

from django.db import connection
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from procrastinate.contrib.django import connector_params

from tests.benchmarks import handling
from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import KEY, settle_down


def make_app(connector: Any) -> App:
    app = App(connector=connector)

    @app.task(name="errand")
    async def errand(number: int) -> None:
        await handling.handle_soon(number)

    return app


@cache
def install() -> App:
    app = make_app(SyncPsycopgConnector(kwargs=connector_params()))
    app.open()
    app.schema_manager.apply_schema()
    return app


def prepare(jobs: int) -> None:
    """Have a lock for each key."""
    app = install()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE procrastinate_jobs, procrastinate_events RESTART IDENTITY CASCADE")
        cursor.execute(f"SELECT id, {KEY} FROM generate_series(1, {jobs}) AS id")  # noqa: S608  # constants
        for number, key in cursor.fetchall():
            app.tasks["errand"].configure(lock=str(key)).defer(number=number)
    settle_down("procrastinate_jobs", "procrastinate_events")


def drain() -> Drained:
    while left():  # its worker ends when the locks of all other jobs are taken
        app = make_app(PsycopgConnector(kwargs=connector_params()))
        app.run_worker(wait=False, concurrency=20, install_signal_handlers=False)
    return Drained()


def left() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'")
        return int(cursor.fetchone()[0])
