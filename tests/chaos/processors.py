"""One processor for each delivery. What it does outside the database is a line in the audit."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from django.db import connection

from dcl_processor import Delivery, Lease, Retry, batch_processor
from tests.chaos import audit, broken
from tests.models import Errand

#: Seconds; a handler takes from none to twice as long.
WORK = float(os.environ.get("CHAOS_WORK", "0.01"))

#: Seconds for which nobody takes over a row whose worker was killed.
LEASE = 4.0

TRANSACTIONAL, AT_MOST_ONCE, AT_LEAST_ONCE = range(3)  # what ``place`` says in a row


def pending(place: int) -> Any:
    return lambda: Errand.objects.filter(place=place, done=False, claimed=False, dead=False)


@batch_processor(pending=pending(TRANSACTIONAL), done={"done": True})
def transactional(row: Errand) -> None:
    handle(row, in_database=True)


@batch_processor(
    pending=pending(AT_MOST_ONCE),
    delivery=Delivery.AT_MOST_ONCE,
    claim={"claimed": True},
    claimed_at="claimed_at",
    done={"done": True},
)
def at_most_once(row: Errand) -> None:
    handle(row)


@batch_processor(
    pending=pending(AT_LEAST_ONCE),
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(LEASE),
    retry=Retry(max_attempts=20, backoff=0.1),
    done={"done": True},
    failed={"dead": True},
)
def at_least_once(row: Errand) -> None:
    handle(row)


def handle(row: Errand, *, in_database: bool = False) -> None:
    audit.note("begin", row.place, row.pk)
    try:
        pause()
        if in_database:
            audit.note("worked", row.place, row.pk, work(row.pk))
        pause()
    except Exception as error:
        audit.note("raised", row.place, row.pk, type(error).__name__)
        raise
    audit.note("end", row.place, row.pk)


def pause() -> None:
    time.sleep(random.uniform(0, WORK))  # noqa: S311  # no secret


def work(pk: int) -> int:
    """Do the row's work in its own database; return the process at the other end that did it."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO chaos_work (row_id, backend) VALUES (%s, pg_backend_pid()) "
            "RETURNING backend",
            [pk],
        )
        backend: int = cursor.fetchone()[0]
    return backend


if os.environ.get("CHAOS_BROKEN") == "yes":
    broken.install()
