"""The Celery app of the cluster, as a project has it in its ``celery.py``."""

from __future__ import annotations

import os

from celery import Celery

import dcl_processor.contrib.celery  # noqa: F401  # the task

app = Celery("cluster", set_as_current=False)
# A worker takes no more than it has processes for: what waited with one while the other is free
# would keep the workers apart.
app.conf.worker_prefetch_multiplier = 1
app.conf.task_acks_late = True
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_url = app.conf.result_backend = os.environ.get("REDIS_URL", "memory://")
