"""One processor for each delivery; the handler does what cannot be taken back, and what can."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.db.models import QuerySet

from dcl_processor import Delivery, Lease, Retry, batch_processor
from tests.gates import wait_at_gate
from tests.models import Errand, Parcel
from tests.waiting import until

# What an errand's place makes its handler do.
PLAIN, WAITS, MEETS = range(3)


def pending() -> QuerySet[Errand]:
    return Errand.objects.filter(done=False, dead=False, claimed=False)


def act(row: Errand) -> None:
    Parcel.objects.create(note=str(row.pk))
    with Path(os.environ["AUDIT"]).open("a") as file:
        # The parent of a pool's process is the worker.
        file.write(f"{row.pk} {os.getppid()}\n")
    if row.place == WAITS:
        wait_at_gate()
    if row.place == MEETS:
        _meet_the_other_worker()


def _meet_the_other_worker() -> None:
    gate = Path(os.environ["GATE"])
    (gate / f"worker-{os.getppid()}").touch()
    until(lambda: len(list(gate.glob("worker-*"))) == 2, "the other worker")


plain: dict[str, Any] = {"pending": pending, "done": {"done": True}}


@batch_processor(**plain)
def deliver(row: Errand) -> None:
    act(row)


@batch_processor(
    **{**plain, "done": {"done": True, "claimed": False}},
    delivery=Delivery.AT_MOST_ONCE,
    claim={"claimed": True},
    claimed_at="claimed_at",
    reset={"claimed": False},
)
def claim(row: Errand) -> None:
    act(row)


@batch_processor(
    **plain,
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(300),
    retry=Retry(3, backoff=0, jitter=0),
    failed={"dead": True},
)
def lease(row: Errand) -> None:
    act(row)
