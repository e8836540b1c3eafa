"""The Celery app of the cluster, as a project has it in its ``celery.py``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import Celery

import dcl_processor.contrib.celery  # noqa: F401  # the task
from dcl_processor import Report
from dcl_processor.signals import run_finished

app = Celery("cluster", set_as_current=False)
# A worker takes no more than it has processes for: what waited with one while the other is free
# would keep the workers apart.
app.conf.worker_prefetch_multiplier = 1
app.conf.task_acks_late = True
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_url = app.conf.result_backend = os.environ.get("REDIS_URL", "memory://")


def note_run(report: Report, **_: Any) -> None:
    """Add a line to the file in the variable RUNS."""
    with Path(os.environ["RUNS"]).open("a") as file:
        file.write(f"{report.processed} {report.stopped}\n")


if "RUNS" in os.environ:
    run_finished.connect(note_run)
