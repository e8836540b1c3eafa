"""The processors. What it does outside the database is a line in the audit."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from django.db import connection

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.chaos import audit
from tests.chaos.judgement import Terms
from tests.chaos.table import PLACES, PROCESSORS
from tests.models import Errand

#: Seconds; a handler takes from none to twice as long.
WORK = float(os.environ.get("CHAOS_WORK", "0.01"))

#: Seconds for which no worker takes over a row whose worker was killed.
LEASE = 4.0


def pending(name: str) -> Any:
    place = PLACES[name]
    waits = {"done": False, "claimed": False, "dead": False}
    return lambda: Errand.objects.filter(place=place, **waits)


ONCE_CLAIMED: dict[str, Any] = {
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True},
}
#: A text column says which worker has claimed the row, and when: person.py decides by that.
TRACED: dict[str, Any] = {
    **ONCE_CLAIMED,
    "claim": {"claimed": True, "last_error": lambda: f"{os.getpid()} {time.monotonic()!r}"},
    "done": {"done": True, "last_error": ""},
    "reset": {"claimed": False, "last_error": ""},
}
LEASED: dict[str, Any] = {
    "delivery": Delivery.AT_LEAST_ONCE,
    "lease": Lease(LEASE),
    "retry": Retry(max_attempts=20, backoff=0.1),
    "done": {"done": True},
    "failed": {"dead": True},
}


DELIVERIES: dict[str, dict[str, Any]] = {
    "transactional": {"done": {"done": True}},
    "at_most_once": ONCE_CLAIMED,
    "at_least_once": LEASED,
}


def _options(terms: Terms) -> dict[str, Any]:
    if terms.most and terms.delivery == "at_most_once":
        options = TRACED
    else:
        options = DELIVERIES[terms.delivery]
    if not terms.has_keys:
        return {**options, "max_in_flight": terms.most or None}
    if not terms.most:
        return {**options, "fair_by": "result"}
    most = None if terms.in_order else terms.most
    return {**options, "group_by": "result", "in_order": terms.in_order, "max_per_group": most}


def _processor(name: str, terms: Terms) -> BatchProcessor[Any]:
    def handler(row: Any) -> None:
        handle(PLACES[name], row.pk, in_database=terms.delivery == "transactional")

    # Any number of rows may wait.
    named = {"name": f"chaos.{name}", **_options(terms)}
    return batch_processor(pending=pending(name), **named)(handler)


# Names of the module, as the command finds them.
globals().update({name: _processor(name, terms) for name, terms in PROCESSORS.items()})


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
