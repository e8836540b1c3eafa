"""The processors. What it does outside the database is a line in the audit."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from django.db import connection

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.chaos import audit
from tests.chaos.table import DELIVERIES
from tests.models import Errand

#: Seconds; a handler takes from none to twice as long.
WORK = float(os.environ.get("CHAOS_WORK", "0.01"))

#: Seconds for which no worker takes over a row whose worker was killed.
LEASE = 4.0


ONCE_CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True},
}
LEASED: dict[str, Any] = {
    "delivery": Delivery.AT_LEAST_ONCE,
    "lease": Lease(LEASE),
    "retry": Retry(max_attempts=20, backoff=0.1),
    "done": {"done": True},
    "failed": {"dead": True},
}


OPTIONS: dict[str, dict[str, Any]] = {
    "transactional": {"done": {"done": True}},
    "at_most_once": ONCE_CLAIMED,
    "at_least_once": LEASED,
}


def _processor(name: str) -> BatchProcessor[Errand]:
    place = DELIVERIES[name]

    def handler(row: Errand) -> None:
        handle(place, row.pk, in_database=name == "transactional")

    # Any number of rows may wait.
    return batch_processor(
        name=f"chaos.{name}",
        pending=lambda: Errand.objects.filter(place=place, done=False, claimed=False, dead=False),
        max_pending=None,
        **OPTIONS[name],
    )(handler)


# Names of the module, as the command finds them.
globals().update({name: _processor(name) for name in DELIVERIES})


def handle(place: int, pk: int, *, in_database: bool = False) -> None:
    audit.note("begin", place, pk)
    try:
        pause()
        if in_database:
            audit.note("worked", place, pk, work(place, pk))
        pause()
    except Exception as error:
        audit.note("raised", place, pk, type(error).__name__)
        raise
    audit.note("end", place, pk)


def pause() -> None:
    time.sleep(random.uniform(0, WORK))  # noqa: S311  # no secret


def work(place: int, pk: int) -> int:
    """Do the row's work in its own database; return the process at the other end that did it."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO chaos_work (place, row_id, backend) VALUES (%s, %s, pg_backend_pid()) "
            "RETURNING backend",
            [place, pk],
        )
        backend: int = cursor.fetchone()[0]
    return backend
