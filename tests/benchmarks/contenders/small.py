"""Runs of one row, as cron, a watch and ``on_commit()`` mostly have them.

All runs of a drain are in one process, after those of the warm-up. Before each run another session
makes one row pending, which is not counted and not timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from io import StringIO

import environ
from django.core.management import call_command

from tests.benchmarks import processors
from tests.benchmarks.contenders import Drained, article
from tests.benchmarks.contenders.raw import connect
from tests.benchmarks.rows import TABLE, fill, left
from tests.models import Errand

__all__ = ["drain_by_hand", "drain_command", "drain_ours", "left", "prepare"]

KEYS = f"SELECT id FROM {TABLE} ORDER BY id"  # noqa: S608  # a constant
ARM = f"UPDATE {TABLE} SET done = false WHERE id = %s"  # noqa: S608  # a constant


def prepare(rows: int) -> None:
    """Make rows that are done already."""
    fill(rows)
    Errand.objects.update(done=True)


def drain_ours(*, delivery: str) -> Drained:
    return _drain(getattr(processors, delivery))


def drain_command(*, delivery: str) -> Drained:
    """Run the command in this process, so that starting Python costs nothing."""
    return _drain(
        lambda: call_command("processors", "run", f"benchmarks.{delivery}", stdout=StringIO())
    )


def drain_by_hand() -> Drained:
    return _drain(article.drain)


def _drain(run: Callable[[], object]) -> Drained:
    host = environ.Env.db_url_config(os.environ["DATABASE_URL"])["HOST"]
    seconds = 0.0
    # This session passes no proxy, which would count what it sends.
    with connect(host) as driver:
        keys = [key for (key,) in driver.execute(KEYS.encode()).fetchall()]
        for key in keys:
            driver.execute(ARM.encode(), [key])
            began = time.perf_counter()
            run()
            seconds += time.perf_counter() - began
    return Drained(len(keys), seconds)
