from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dcl_processor import Lease, Retry, batch_processor
from tests.models import Errand, Parcel
from tests.warehouse.processors import audit, wait_at_gate


def act(row: Parcel | Errand) -> None:
    """Do as the row says, or never come back."""
    audit(row)
    HOW[row.note if isinstance(row, Parcel) else row.result]()


PARCELS: dict[str, Any] = {
    "pending": lambda: Parcel.objects.filter(sent=False),
    "done": {"sent": True},
}
deliver = batch_processor(**PARCELS, name="hanging.deliver", handler_timeout=2)(act)
deliver_slowly = batch_processor(**PARCELS, name="hanging.deliver_slowly")(act)

ERRANDS: dict[str, Any] = {
    "pending": lambda: Errand.objects.filter(done=False, claimed=False),
    "done": {"done": True},
    "handler_timeout": 2,
}
MARKED: dict[str, Any] = {"claim": {"claimed": True}, "claimed_at": "claimed_at"}
LEASED: dict[str, Any] = {"lease": Lease(600), "retry": Retry()}
fetch = batch_processor(**ERRANDS, **MARKED, name="hanging.fetch", delivery="at_most_once")(act)
bring = batch_processor(**ERRANDS, **LEASED, name="hanging.bring", delivery="at_least_once")(act)


def catch_everything() -> None:
    while True:
        with suppress(BaseException):
            time.sleep(0.01)


def wait_in_c() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).pause()


def leave_a_child() -> None:
    if os.fork() == 0:
        # The test waits for the end of these; the child keeps the pipe to the supervisor.
        os.close(1)
        os.close(2)
        time.sleep(20)
        os._exit(0)
    catch_everything()


def die_and_leave_a_child() -> None:
    if (left := os.fork()) == 0:
        time.sleep(60)  # with the pipe to the supervisor
        os._exit(0)
    Path(os.environ["LEFT"]).write_text(str(left))
    os.kill(os.getpid(), signal.SIGKILL)


HOW: dict[str, Callable[[], object]] = {
    "catches everything": catch_everything,
    "waits in C without signals": wait_in_c,
    "keeps the GIL": lambda: ctypes.PyDLL(None).sleep(600),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leaves a child": leave_a_child,
    "dies and leaves a child": die_and_leave_a_child,
    "fails": lambda: 1 / 0,
    "gate": wait_at_gate,
    "": lambda: None,
}
