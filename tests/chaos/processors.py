"""The processors. What it does outside the database is a line in the audit."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Any

from django.db import connection

from dcl_processor import Delivery, Lease, Retry, batch_processor
from tests.chaos import audit
from tests.chaos.table import MODELS, PLACES
from tests.models import Errand, Express

#: Seconds; a handler takes from none to twice as long.
WORK = float(os.environ.get("CHAOS_WORK", "0.01"))

#: Any number of rows may wait.
unlimited = partial(batch_processor, max_pending=None)

#: Seconds for which no worker takes over a row whose worker was killed.
LEASE = 4.0


def pending(name: str) -> Any:
    place = PLACES[name]
    waits = {"done": False, "claimed": False, "dead": False}
    if name in MODELS["two-tables"]:
        return lambda: Express.objects.filter(result=str(place), **waits)
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


@unlimited(pending=pending("transactional"), done={"done": True})
def transactional(row: Errand) -> None:
    handle(row.place, row.pk, in_database=True)


@unlimited(pending=pending("at_most_once"), **ONCE_CLAIMED)
def at_most_once(row: Errand) -> None:
    handle(row.place, row.pk)


@unlimited(pending=pending("at_least_once"), **LEASED)
def at_least_once(row: Errand) -> None:
    handle(row.place, row.pk)


# The flags are the parent's; the lease, the attempts and the time of the claim are the child's.
@unlimited(pending=pending("two_tables_transactional"), done={"done": True})
def two_tables_transactional(row: Express) -> None:
    handle(int(row.result), row.pk, in_database=True)


@unlimited(pending=pending("two_tables_at_most_once"), **ONCE_CLAIMED)
def two_tables_at_most_once(row: Express) -> None:
    handle(int(row.result), row.pk)


@unlimited(pending=pending("two_tables_at_least_once"), **LEASED)
def two_tables_at_least_once(row: Express) -> None:
    handle(int(row.result), row.pk)


IN_ORDER: dict[str, Any] = {"group_by": "result", "in_order": True}


@unlimited(pending=pending("in_order_transactional"), done={"done": True}, **IN_ORDER)
def in_order_transactional(row: Errand) -> None:
    handle(row.place, row.pk, in_database=True)


@unlimited(pending=pending("in_order_at_most_once"), **TRACED, **IN_ORDER)
def in_order_at_most_once(row: Errand) -> None:
    handle(row.place, row.pk)


@unlimited(pending=pending("in_order_at_least_once"), **LEASED, **IN_ORDER)
def in_order_at_least_once(row: Errand) -> None:
    handle(row.place, row.pk)


TWO_PER_KEY: dict[str, Any] = {"group_by": "result", "max_per_group": 2}


@unlimited(pending=pending("two_per_key_transactional"), done={"done": True}, **TWO_PER_KEY)
def two_per_key_transactional(row: Errand) -> None:
    handle(row.place, row.pk, in_database=True)


@unlimited(pending=pending("two_per_key_at_most_once"), **TRACED, **TWO_PER_KEY)
def two_per_key_at_most_once(row: Errand) -> None:
    handle(row.place, row.pk)


@unlimited(pending=pending("two_per_key_at_least_once"), **LEASED, **TWO_PER_KEY)
def two_per_key_at_least_once(row: Errand) -> None:
    handle(row.place, row.pk)


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
