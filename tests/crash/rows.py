"""The rows that the copies of these tests work on, and what has become of them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.db import transaction

from dcl_processor import Report
from dcl_processor.clock import DatabaseNow
from tests.crash.processors import FAILS, PLAIN
from tests.models import Depot, Errand, Parcel

# Numbers that nothing else in a statement has.
FIRST, SECOND, THIRD = ROWS = (7_000_001, 7_000_002, 7_000_003)


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
    Errand.objects.bulk_create(Errand(pk=pk, place=FAILS if pk == fails else PLAIN) for pk in pks)


def rows() -> dict[int, Errand]:
    return Errand.objects.in_bulk()


def those(condition: Callable[[Errand], Any]) -> set[int]:
    return {pk for pk, row in rows().items() if condition(row)}


def figures(report: Report) -> dict[str, int]:
    """Return the counts that are not zero."""
    names = ["processed", "failed", "discarded", "snoozed", "skipped", "stale", "lease_lost"]
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def counts(**numbers: int) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number}


def work() -> Counter[int]:
    """Count what the handlers did in the database."""
    notes = Parcel.objects.exclude(note="").values_list("note", flat=True)
    return Counter(map(int, notes))


def time_passes() -> None:
    """Put every lease back by more than it lasts."""
    leased = Errand.objects.filter(leased_until__isnull=False)
    leased.update(leased_until=DatabaseNow() - timedelta(seconds=1))
