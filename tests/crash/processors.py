"""One processor for each order of things in which a process may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.models import Q, QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.crash import trace
from tests.crash.audit import effect
from tests.gates import wait_at_gate
from tests.models import Depot, Errand, Parcel
from tests.waiting import PATIENCE

# What an errand's place makes its handler do.
PLAIN, FAILS, KILLS, WAITS, HANGS, QUITS = range(6)
QUIT = 70  # exit code of a process that a handler ends

# At once again, so that the next copy shows what the one before has left.
AT_ONCE: dict[str, Any] = {"backoff": 0, "jitter": 0}


def pending() -> QuerySet[Errand]:
    return Errand.objects.filter(done=False, dead=False, claimed=False)


def spanning() -> QuerySet[Errand]:
    """Ask a second table too, so that the second check is a statement of its own."""
    return pending().filter(Q(place__in=Depot.objects.filter(open=True).values("parcels__weight")))


#: Under its mark a row stays in pending for as long as it has a lease, a lapsed one included.
MAY_BE_MARKED = Q(claimed=False) | Q(claimed=True, leased_until__isnull=False)


def marked() -> QuerySet[Errand]:
    return Errand.objects.filter(MAY_BE_MARKED, done=False, dead=False)


def act(row: Errand) -> None:
    """Do what cannot be taken back, and then what the row's place says."""
    place = row.place
    trace.note("before the effect", row.pk)
    effect(row.pk)
    trace.note("after the effect", row.pk)
    if place == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if place == QUITS:
        os._exit(QUIT)
    if place == WAITS:
        wait_at_gate()
    if place == HANGS:
        time.sleep(PATIENCE)
        raise TimeoutError("it was not killed")
    if place == FAILS:
        raise ValueError("not at home")


def act_here_too(row: Errand) -> None:
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
MODES: dict[str, dict[str, Any]] = {
    "by_key": {"group_by": "result"},
    "in_order": {"group_by": "result", "in_order": True},
    "two_at_once": {"group_by": "result", "max_per_group": 2},
}
pairs: dict[str, Any] = {"batch_size": 2}
for_ever: dict[str, Any] = {**plain, "delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(300)}


def save_and_act(row: Errand) -> None:
    row.result = "saved"
    row.save()
    act(row)


def lock_and_act(row: Errand) -> None:
    with transaction.atomic(using=row._state.db):
        [_] = Errand.objects.using(row._state.db).filter(pk=row.pk).select_for_update()
        act(row)


async def act_on_loop(row: Errand) -> None:
    act(row)


def act_on_all(rows: Sequence[Errand]) -> None:
    """Handle two rows in one call, which are settled together."""
    for row in rows:
        act(row)


#: What each is made of, beside its name. Without a handler it is ``act()``.
OPTIONS: dict[str, dict[str, Any]] = {
    "transactional": plain,
    "transactional_spanning": {**plain, "pending": spanning},
    "transactional_batch": {**plain, **pairs},
    "transactional_retry": {**plain, **again},
    "transactional_retry_batch": {**plain, **again, **pairs},
    "at_most_once": plain_at_most_once,
    "at_most_once_batch": {**plain_at_most_once, **pairs},
    "claim": claimed,
    "claim_spanning": {**claimed, "pending": spanning},
    "claim_batch": {**claimed, **pairs},
    "claim_retry": {**claimed, **again},
    "claim_locking": {**claimed, "handler": lock_and_act},
    "lease": leased,
    "lease_spanning": {**leased, "pending": spanning},
    "lease_batch": {**leased, **pairs},
    "lease_process_batch": {**leased, **pairs, "process_batch": act_on_all},
    "lease_saving": {**leased, "handler": save_and_act},
    "lease_locking": {**leased, "handler": lock_and_act},
    "lease_for_ever": for_ever,
    "lease_for_ever_batch": {**for_ever, **pairs},
    "lease_for_ever_async": {**for_ever, "handler": act_on_loop},
    "lease_marked": marking,
    "lease_marked_batch": {**marking, **pairs},
    "lease_marked_process_batch": {**marking, **pairs, "process_batch": act_on_all},
    "lease_marked_by_key": {**marking, **MODES["by_key"]},
    "beating_lease": {**leased, "lease": Lease(6)},
    "short_lease": {**leased, "lease": Lease(1)},
    **{
        f"{name}_{mode}": {**options, **keyed}
        for name, options in (("transactional", plain), ("claim", claimed), ("lease", leased))
        for mode, keyed in MODES.items()
    },
}


def _processor(name: str, handler: Any = act, **options: Any) -> BatchProcessor[Any]:
    if name.startswith("transactional"):
        handler = act_here_too
    return batch_processor(name=f"crash.{name}", **options)(handler)


# Names of the module, as the command finds them.
globals().update({name: _processor(name, **options) for name, options in OPTIONS.items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> BatchProcessor[Any]: ...
