from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dcl_processor import Lease, Retry, batch_processor
from tests.models import Errand, Parcel
from tests.warehouse.processors import audit


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


@batch_processor(**ERRANDS, name="hanging.fetch_async", delivery="at_most_once")
async def fetch_async(row: Errand) -> None:
    """Do the same in an event loop."""
    act(row)


def catch_everything() -> None:
    # Long sleeps: what interrupts them is raised inside, and never between two of them.
    while True:
        with suppress(BaseException):
            time.sleep(60)


def wait_in_c() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).pause()


def die_and_leave_a_child() -> None:
    if (left := os.fork()) == 0:
        time.sleep(60)  # with the pipe to the supervisor
        os._exit(0)
    Path(os.environ["LEFT"]).write_text(str(left))
    os.kill(os.getpid(), signal.SIGKILL)


def fork(end: Callable[[], object], code: int) -> Callable[[], None]:
    """Return a handler's act: fork a child, and expect of it that it ends with the handler."""

    def forking() -> None:
        if (child := os.fork()) == 0:
            end()
            return
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == code

    return forking


def use_a_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:  # which ends its processes by SIGTERM
        assert pool.map(abs, [-1, 1]) == [1, 1]


HOW: dict[str, Callable[[], object]] = {
    "forks a child that exits": fork(partial(sys.exit, 3), 1),
    "forks a child that raises": fork(lambda: 1 / 0, 1),
    "forks a child that returns": fork(lambda: None, 0),
    "uses a pool": use_a_pool,
    "catches everything": catch_everything,
    "waits in C without signals": wait_in_c,
    "keeps the GIL": lambda: ctypes.PyDLL(None).sleep(600),
    "dies and leaves a child": die_and_leave_a_child,
    "": lambda: None,
}
