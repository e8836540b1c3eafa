"""One processor for each order of things in which a process may die."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.crash import trace
from tests.crash.audit import effect
from tests.models import Depot, Errand, Express, Parcel
from tests.waiting import PATIENCE
from tests.warehouse.processors import wait_at_gate

# What an errand's place makes its handler do.
PLAIN, FAILS, KILLS, WAITS, HANGS, EXITS, QUITS = range(7)
QUIT = 70  # exit code of a process that a handler ends

# At once again, so that the next copy shows what the one before has left.
AT_ONCE: dict[str, Any] = {"backoff": 0, "jitter": 0}


def pending() -> QuerySet[Errand]:
    return Errand.objects.filter(done=False, dead=False, claimed=False)


def spanning() -> QuerySet[Errand]:
    """Ask a second table too, so that the second check is a statement of its own."""
    return pending().filter(Q(place__in=Depot.objects.filter(open=True).values("parcels__weight")))


def two_tables() -> QuerySet[Express]:
    """Ask for flags in the parent's table; the lease and the attempts are in the row's own."""
    return Express.objects.filter(done=False, dead=False, claimed=False)


#: Under its mark a row stays in pending for as long as it has a lease, a lapsed one included.
MAY_BE_MARKED = Q(claimed=False) | Q(claimed=True, leased_until__isnull=False)


def marked() -> QuerySet[Errand]:
    return Errand.objects.filter(MAY_BE_MARKED, done=False, dead=False)


def marked_two_tables() -> QuerySet[Express]:
    return Express.objects.filter(MAY_BE_MARKED, done=False, dead=False)


def act(row: Errand | Express) -> None:
    """Do what cannot be taken back, and then what the row's place says."""
    place = row.place if isinstance(row, Errand) else int(row.result or PLAIN)
    trace.note("before the effect", row.pk)
    effect(row.pk)
    trace.note("after the effect", row.pk)
    if place == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if place == QUITS:
        os._exit(QUIT)
    if place == EXITS:
        sys.exit(QUIT)
    if place == WAITS:
        wait_at_gate()
    if place == HANGS:
        time.sleep(PATIENCE)
        raise TimeoutError("it was not killed")
    if place == FAILS:
        raise ValueError("not at home")


def act_here_too(row: Errand | Express) -> None:
    """Do work in the database as well: in the transaction of the row, if it has one."""
    Parcel(note=str(row.pk)).save(using=row._state.db)
    act(row)


plain: dict[str, Any] = {"pending": pending, "done": {"done": True}}
again: dict[str, Any] = {"failed": {"dead": True}, "retry": Retry(3, **AT_ONCE)}
plain_at_most_once: dict[str, Any] = {**plain, "delivery": Delivery.AT_MOST_ONCE}
claimed: dict[str, Any] = {
    "pending": pending,
    "delivery": Delivery.AT_MOST_ONCE,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True, "claimed": False},
    "reset": {"claimed": False},
}
leased: dict[str, Any] = {
    **plain,
    **again,
    "delivery": Delivery.AT_LEAST_ONCE,
    # Long: no test waits for it, they put it back.
    "lease": Lease(300),
}
marking: dict[str, Any] = {
    **leased,
    "pending": marked,
    "claim": {"claimed": True},
    "claimed_at": "claimed_at",
    "done": {"done": True, "claimed": False},
    "reset": {"claimed": False},
}


#: All errands have one key, unless a test gives them others.
keyed: dict[str, Any] = {"group_by": "result"}
in_order: dict[str, Any] = {**keyed, "in_order": True}
two_at_once: dict[str, Any] = {**keyed, "max_per_group": 2}


@batch_processor(**plain)
def transactional(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**{**plain, "pending": spanning})
def transactional_spanning(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain, **keyed)
def transactional_by_key(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain, **in_order)
def transactional_in_order(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain, **two_at_once)
def transactional_two_at_once(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain, batch_size=2)
def transactional_batch(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain, **again)
def transactional_retry(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain, **again, batch_size=2)
def transactional_retry_batch(row: Errand) -> None:
    act_here_too(row)


@batch_processor(**plain_at_most_once)
def at_most_once(row: Errand) -> None:
    act(row)


@batch_processor(**plain_at_most_once, batch_size=2)
def at_most_once_batch(row: Errand) -> None:
    act(row)


@batch_processor(**claimed)
def claim(row: Errand) -> None:
    act(row)


@batch_processor(**{**claimed, "pending": spanning})
def claim_spanning(row: Errand) -> None:
    act(row)


@batch_processor(**claimed, batch_size=2)
def claim_batch(row: Errand) -> None:
    act(row)


@batch_processor(**claimed, **again)
def claim_retry(row: Errand) -> None:
    act(row)


@batch_processor(**leased)
def lease(row: Errand) -> None:
    act(row)


@batch_processor(**{**leased, "pending": spanning})
def lease_spanning(row: Errand) -> None:
    act(row)


@batch_processor(**leased, batch_size=2)
def lease_batch(row: Errand) -> None:
    act(row)


@batch_processor(**{**leased, "lease": Lease(6)})
def beating_lease(row: Errand) -> None:
    act(row)


@batch_processor(**{**leased, "lease": Lease(1)})
def short_lease(row: Errand) -> None:
    act(row)


@batch_processor(**{**plain, "pending": two_tables})
def transactional_two_tables(row: Express) -> None:
    act_here_too(row)


@batch_processor(**{**plain, **again, "pending": two_tables})
def transactional_two_tables_retry(row: Express) -> None:
    act_here_too(row)


@batch_processor(**{**claimed, "pending": two_tables})
def claim_two_tables(row: Express) -> None:
    act(row)


@batch_processor(**{**claimed, **again, "pending": two_tables})
def claim_two_tables_retry(row: Express) -> None:
    act(row)


@batch_processor(**plain, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(300))
def lease_for_ever(row: Errand) -> None:
    act(row)


@batch_processor(**plain, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(300), batch_size=2)
def lease_for_ever_batch(row: Errand) -> None:
    act(row)


@batch_processor(**plain, delivery=Delivery.AT_LEAST_ONCE, lease=Lease(300))
async def lease_for_ever_async(row: Errand) -> None:
    act(row)


@batch_processor(**{**leased, "pending": two_tables})
def lease_two_tables(row: Express) -> None:
    act(row)


@batch_processor(**marking)
def lease_marked(row: Errand) -> None:
    act(row)


@batch_processor(**marking, batch_size=2)
def lease_marked_batch(row: Errand) -> None:
    act(row)


@batch_processor(**{**marking, "pending": marked_two_tables})
def lease_marked_two_tables(row: Express) -> None:
    act(row)


@batch_processor(**leased)
def lease_saving(row: Errand) -> None:
    row.result = "saved"
    row.save()
    act(row)


@batch_processor(**leased)
def lease_locking(row: Errand) -> None:
    with transaction.atomic(using=row._state.db):
        [_] = Errand.objects.using(row._state.db).filter(pk=row.pk).select_for_update()
        act(row)


@batch_processor(**claimed)
def claim_locking(row: Errand) -> None:
    with transaction.atomic(using=row._state.db):
        [_] = Errand.objects.using(row._state.db).filter(pk=row.pk).select_for_update()
        act(row)


@batch_processor(**claimed, **keyed)
def claim_by_key(row: Errand) -> None:
    act(row)


@batch_processor(**claimed, **in_order)
def claim_in_order(row: Errand) -> None:
    act(row)


@batch_processor(**claimed, **two_at_once)
def claim_two_at_once(row: Errand) -> None:
    act(row)


@batch_processor(**marking, **keyed)
def lease_marked_by_key(row: Errand) -> None:
    act(row)


class Bulk(BatchProcessor[Errand]):
    """Handles two rows in one call, and settles them together."""

    def process_batch(self, rows: Sequence[Errand], /, *_: Any) -> None:
        for row in rows:
            act(row)


at_most_once_process_batch = Bulk(
    **plain_at_most_once, batch_size=2, name="crash.at_most_once_process_batch"
)
claim_process_batch = Bulk(**claimed, batch_size=2, name="crash.claim_process_batch")
lease_process_batch = Bulk(**leased, batch_size=2, name="crash.lease_process_batch")
lease_marked_process_batch = Bulk(**marking, batch_size=2, name="crash.lease_marked_process_batch")


@batch_processor(**leased, **keyed)
def lease_by_key(row: Errand) -> None:
    act(row)


@batch_processor(**leased, **in_order)
def lease_in_order(row: Errand) -> None:
    act(row)


@batch_processor(**leased, **two_at_once)
def lease_two_at_once(row: Errand) -> None:
    act(row)
