"""A processor of each delivery and mode; its handler adds a line to the log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.db.models import Q

from dcl_processor import BatchProcessor, Delivery, Lease, batch_processor
from dcl_processor.engine import key_claim
from tests import seams
from tests.models import Errand

#: How the rows of a key are handled, and how many of them may be in flight; 0: any number.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 0),
    "by_key": ({"group_by": "place"}, 1),
    "in_order": ({"group_by": "place", "in_order": True}, 1),
    "two_at_once": ({"group_by": "place", "max_per_group": 2}, 2),
}
DELIVERIES: dict[str, dict[str, Any]] = {
    "transactional": {},
    "at_most_once": {
        "delivery": Delivery.AT_MOST_ONCE,
        "claim": {"claimed": True},
        "claimed_at": "claimed_at",
    },
    "at_least_once": {"delivery": Delivery.AT_LEAST_ONCE, "lease": Lease(60)},
}

#: Seconds that a handler takes.
WORK = 0.001
#: Lines of the log.
BEGIN = "INSERT INTO keys_log (row_id, key, what, at, turn) VALUES (%s, %s, 'begin', %s, %s)"


class Turn:
    """When the lock of a key was asked for last in this process; one thread handles rows."""

    asked = 0.0


def processor(delivery: str, mode: str, **options: Any) -> BatchProcessor[Errand]:
    """Return a processor whose handler takes a moment."""

    def handler(row: Errand) -> None:
        with connection.cursor() as cursor:
            turn = Turn.asked or time.time()
            cursor.execute(BEGIN, [row.pk, row.place, time.time(), turn])
        time.sleep(WORK)

    make: Callable[..., Any] = batch_processor(
        name=f"keys.{delivery}_{mode}",
        max_pending=None,
        pending=lambda: Errand.objects.filter(done=False, claimed=False),
        done={"done": True, "claimed": False},
        reset={"done": False, "claimed": False},
        **{**DELIVERIES[delivery], **MODES[mode][0], **options},
    )
    made: BatchProcessor[Errand] = make(handler)
    return made


def filtered(number: int) -> Q | None:
    """Return the filter of a worker's first run: the first worker leaves out most heads."""
    return Q(pk__gte=Errand.objects.count() * 5) if number == 0 else None


def install() -> None:
    """Note when a key is locked."""
    real = key_claim._locking

    def locking(numbers: list[int], *, one: bool) -> Any:
        Turn.asked = time.time()
        return real(numbers, one=one)

    seams.replace(pytest.MonkeyPatch(), seams.KEY_LOCK, locking)
