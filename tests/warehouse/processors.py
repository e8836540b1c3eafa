from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from pathlib import Path

from django.db import connection, transaction
from django.db.models import QuerySet

from dcl_processor import BatchProcessor, Delivery, Lease, Retry, batch_processor
from tests.gates import wait_at_gate
from tests.models import Errand, Parcel
from tests.waiting import PATIENCE


# These have a name, because tests import them where the app is not installed.
@batch_processor(
    name="warehouse.deliver", pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True}
)
def deliver(parcel: Parcel) -> None:
    """Bring a parcel to its door.

    Each call adds a line to the file in the variable AUDIT.
    """
    match parcel.note:
        case "broken":
            raise ValueError("no\naddress")
        case "gate":
            wait_at_gate()
    audit(parcel)
    end(parcel.note)


@batch_processor(
    name="warehouse.deliver_alone",
    pending=lambda: Parcel.objects.filter(sent=False, note__startswith="alone"),
    done={"sent": True},
    max_in_flight=1,
)
def deliver_alone(parcel: Parcel) -> None:
    """Bring a parcel to its door, by one worker at a time."""
    if parcel.note == "alone, gate":
        wait_at_gate()
    audit(parcel)


def end(how: str) -> None:
    """End the process in one of several ways, or not."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            ctypes.string_at(0)  # as an error in a C extension does
        case "exit at once":
            os._exit(9)
        case "server gone":
            transaction.on_commit(_server_gone)


def _server_gone() -> None:
    """Lose the session after the row's transaction, and the server with it."""
    connection.settings_dict["PORT"] = "1"
    assert connection.connection is not None
    connection.connection.close()


class Weigh(BatchProcessor[Parcel]):
    """Weigh the parcels that have no weight."""

    name = "warehouse.weigh"
    done = {"weight": 7}

    def pending(self) -> QuerySet[Parcel]:
        """Return the parcels without a weight."""
        return Parcel.objects.filter(weight=None)

    def process(self, row: Parcel, /) -> None:
        """Pretend."""


weigh = Weigh()

four_at_once = asyncio.Barrier(4)


@batch_processor(
    pending=lambda: Errand.objects.filter(done=False),
    done={"done": True},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(600),
)
async def gather(_: Errand) -> None:
    """Go on when four are there, who then wait at the gate if there is one."""
    gate = Path(os.environ["GATE"]) if "GATE" in os.environ else None
    if gate is not None and (gate / "open").exists():
        return
    async with asyncio.timeout(PATIENCE):
        await four_at_once.wait()
        if gate is not None:
            (gate / f"met-{os.getpid()}").touch()
            while not (gate / "open").exists():
                await asyncio.sleep(0.01)


@batch_processor(
    pending=lambda: Errand.objects.filter(done=False, dead=False).exclude(result=""),
    done={"done": True},
    failed={"dead": True},
    retry=Retry(max_attempts=2, backoff=0, jitter=0),
)
def try_twice(errand: Errand) -> None:
    """Fail as the errand says."""
    raise OSError(errand.result)


@batch_processor(
    name="warehouse.fetch",
    pending=lambda: Errand.objects.filter(done=False, claimed=False, result=""),
    done={"done": True},
    claim={"claimed": True},
    claimed_at="claimed_at",
    reset={"claimed": False},
    delivery=Delivery.AT_MOST_ONCE,
)
def fetch(errand: Errand) -> None:
    """Fetch, and wait at the gate if there is one."""
    if "GATE" in os.environ:
        wait_at_gate()


def audit(row: Parcel | Errand) -> None:
    if path := os.environ.get("AUDIT"):
        # One short line in append mode is written whole, even if other processes write.
        with Path(path).open("a") as file:
            file.write(f"{row.pk} {os.getpid()}\n")
