"""A processor whose handler does what cannot be taken back, and what can."""

from __future__ import annotations

import os
from pathlib import Path

from dcl_processor import batch_processor
from tests.gates import wait_at_gate
from tests.models import Errand, Parcel

# What an errand's place makes its handler do.
PLAIN, WAITS = range(2)


def act(row: Errand) -> None:
    Parcel.objects.create(note=str(row.pk))
    with Path(os.environ["AUDIT"]).open("a") as file:
        file.write(f"{row.pk}\n")
    if row.place == WAITS:
        wait_at_gate()


@batch_processor(pending=Errand.objects.filter(done=False), done={"done": True})
def deliver(row: Errand) -> None:
    act(row)
