"""The rows that the workers of these tests work on, and what has become of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import transaction

from dcl_processor.pending.clock import DatabaseNow
from tests.crash.processors import FAILS, PLAIN
from tests.models import Depot, Errand, Parcel

# Numbers that nothing else in a statement has.
FIRST, SECOND, THIRD = ROWS = (7_000_001, 7_000_002, 7_000_003)
FOURTH = 7_000_004


@transaction.atomic
def fresh(*pks: int, fails: int | None = None) -> None:
    """Have these errands, and none that were there before, nor a note of them."""
    for note in Path(tempfile.gettempdir()).glob("dcl_processor-*/*"):
        note.unlink()
    Errand.objects.all().delete()
    Parcel.objects.all().delete()
    Depot.objects.all().delete()
    # What the spanning questions ask for.
    depot = Depot.objects.create()
    Parcel.objects.bulk_create(Parcel(depot=depot, weight=place) for place in (PLAIN, FAILS))
    places = {pk: FAILS if pk == fails else PLAIN for pk in pks}
    Errand.objects.bulk_create(Errand(pk=pk, place=place) for pk, place in places.items())


def rows() -> dict[int, Any]:
    return {**Errand.objects.in_bulk()}


def state(row: Any) -> str:
    """Name the state that the row is in, by the table of crashes."""
    states = {
        "pending": (False, False, False, False),
        "done": (True, False, False, False),
        "in doubt": (False, True, True, False),
        "leased": (False, False, False, True),
        "marked": (False, True, True, True),
    }
    columns = (row.done, row.claimed, row.claimed_at is not None, row.leased_until is not None)
    [name] = [name for name, expected in states.items() if expected == columns] or [""]
    assert name, f"row {row.pk} is neither pending nor done, in doubt, leased or marked: {columns}"
    return name


def those(condition: Callable[[Any], Any]) -> set[int]:
    return {pk for pk, row in rows().items() if condition(row)}


def work() -> Counter[int]:
    """Count what the handlers did in the database."""
    notes = Parcel.objects.exclude(note="").values_list("note", flat=True)
    return Counter(map(int, notes))


def time_passes() -> None:
    """Put every lease back by more than it lasts."""
    leased = Errand.objects.filter(leased_until__isnull=False)
    leased.update(leased_until=DatabaseNow() - timedelta(seconds=1))
