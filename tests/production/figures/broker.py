"""A run, against a broker's task for each row."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests.cluster.processes import worker
from tests.production.figures.bench import ROUNDS, say, seconds
from tests.servers.redis import redis

ROWS = 500


def measure_broker() -> None:
    """Handle five hundred rows in one run, and by one task for each, on one worker."""
    times: dict[str, list[float]] = {"run": [], "tasks": []}
    with tempfile.TemporaryDirectory() as name, redis() as url:
        from tests.cluster.app import app

        app.conf.broker_url = app.conf.result_backend = url
        variables = {"REDIS_URL": url, "AUDIT": f"{name}/audit"}
        with worker(Path(name), "one", variables=variables, size=1):
            _one_run(app)
            for _ in range(ROUNDS):
                times["tasks"].append(_tasks(app))
                times["run"].append(_one_run(app))
    rate = median(times["tasks"]) / median(times["run"])
    say("rows/s of one run, against a task for each", rate)


def _tasks(app: Any) -> float:
    def send() -> None:
        for pk in keys:
            app.send_task("cluster.one", (pk,), ignore_result=True)
        _wait_until_done()

    keys = _fresh()
    return seconds(send)


def _one_run(app: Any) -> float:
    def send() -> None:
        app.send_task("dcl_processor.run", ("cluster.deliver",))
        _wait_until_done()

    _fresh()
    return seconds(send)


def _fresh() -> list[int]:
    from tests.models import Errand

    Errand.objects.all().delete()
    return [row.pk for row in Errand.objects.bulk_create(Errand() for _ in range(ROWS))]


def _wait_until_done() -> None:
    from tests.models import Errand

    while Errand.objects.filter(done=False).exists():
        time.sleep(0.005)
