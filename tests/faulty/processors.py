from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from dcl_processor import batch_processor
from tests.faulty.models import Ghost
from tests.models import Parcel


@batch_processor(pending=lambda: Ghost.objects.filter(sent=False), done={"sent": True})
def haunt(ghost: Ghost) -> None:
    raise AssertionError("never called")


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False), done={"tries": 1})
def run_in_circles(parcel: Parcel) -> None:
    raise AssertionError("never called")


@batch_processor(pending=lambda: Parcel.objects.filter(sent=False)[:10], done={"sent": True})
def slice_off(parcel: Parcel) -> None:
    raise AssertionError("never called")


def mailbox() -> AbstractContextManager[None]:
    """Open what the variable MAILBOX names, if it is there."""
    if not Path(os.environ["MAILBOX"]).exists():
        raise ConnectionRefusedError("closed today")
    return nullcontext()


@batch_processor(
    pending=lambda: Parcel.objects.filter(sent=False), done={"sent": True}, resource=mailbox
)
def post(parcel: Parcel, _: None) -> None: ...
