"""procrastinate, with a lock for each key."""

from __future__ import annotations

from django.db import connection

from tests.benchmarks.contenders import Drained
from tests.benchmarks.rows import KEY, settle_down

from . import procrastinate
from .procrastinate import left

__all__ = ["drain", "left", "prepare"]


def prepare(jobs: int) -> None:
    app = procrastinate.empty()
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT id, {KEY} FROM generate_series(1, {jobs}) AS id")  # noqa: S608  # constants
        for number, key in cursor.fetchall():
            app.tasks["errand"].configure(lock=str(key)).defer(number=number)
    settle_down("procrastinate_jobs", "procrastinate_events")


def drain(workers: int, *, concurrency: int) -> Drained:
    while left():  # its worker ends when the locks of all other jobs are taken
        procrastinate.drain(workers, concurrency=concurrency)
    return Drained()
