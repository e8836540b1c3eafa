from __future__ import annotations

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
