from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from dcl_processor import Delivery, Lease, Retry, batch_processor
from tests.models import Errand, Parcel
from tests.warehouse.processors import audit, wait_at_gate


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True}, handler_timeout=2
)
def deliver(parcel: Parcel) -> None:
    """Bring a parcel to its door, or never come back."""
    audit(parcel)
    HOW[parcel.note]()


runs_errands = partial(
    batch_processor,
    pending=lambda: Errand.objects.filter(done=False, claimed=False),
    done={"done": True},
    handler_timeout=2,
)


@runs_errands(delivery=Delivery.AT_MOST_ONCE, claim={"claimed": True}, claimed_at="claimed_at")
def fetch(errand: Errand) -> None:
    """Run an errand once, or never come back."""
    run_errand(errand)


@runs_errands(delivery=Delivery.AT_LEAST_ONCE, lease=Lease(600), retry=Retry())
def bring(errand: Errand) -> None:
    """Run an errand until it is done, or never come back."""
    run_errand(errand)


def run_errand(errand: Errand) -> None:
    audit(errand)
    HOW[errand.result]()


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True})
def deliver_slowly(parcel: Parcel) -> None:
    """Bring a parcel to its door, however long it takes."""
    audit(parcel)
    HOW[parcel.note]()


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
