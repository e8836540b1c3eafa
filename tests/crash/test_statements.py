"""I9: what a process killed at any statement leaves, and what the next copy makes of it.

Each processor runs once undisturbed, and every boundary that it passes is noted. Then it is
killed at each of them, and what is left is compared with what its delivery promises, which depends
on three facts: was the row's claim committed, had its effect happened, was its outcome committed.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db.models import F

from dcl_processor import BatchProcessor, Report
from dcl_processor.clock import DatabaseNow
from tests.crash import processors, victims
from tests.crash.audit import effects
from tests.crash.processors import FAILS, PLAIN
from tests.crash.trace import Boundary
from tests.models import Depot, Errand, Parcel

pytestmark = pytest.mark.django_db(transaction=True)

# Numbers that nothing else in a statement has.
FIRST, SECOND, THIRD = ROWS = (7_000_001, 7_000_002, 7_000_003)


@dataclass
class Left:
    """What has happened when a process died, by row."""

    claimed: set[int]
    effects: Counter[int]
    settled: set[int]

    @classmethod
    def behind(cls, passed: Sequence[Boundary]) -> Left:
        left = cls(set(), Counter(), set())
        for boundary in passed:
            if boundary.name == "after the effect":
                left.effects.update(boundary.pks)
            elif boundary.commits:
                acted = boundary.pks & left.effects.keys()
                left.settled |= acted
                left.claimed |= boundary.pks - acted
        return left


def fresh(audit: str, fails: int | None) -> None:
    Path(audit).write_text("")
    Errand.objects.all().delete()
    Parcel.objects.all().delete()
    Depot.objects.all().delete()
    # What the spanning questions ask for.
    depot = Depot.objects.create()
    Parcel.objects.bulk_create(Parcel(depot=depot, weight=place) for place in (PLAIN, FAILS))
    Errand.objects.bulk_create(
        Errand(pk=pk, place=FAILS if pk == fails else PLAIN) for pk in ROWS
    )


def rows() -> dict[int, Errand]:
    return Errand.objects.in_bulk()


def those(condition: Callable[[Errand], Any]) -> set[int]:
    return {pk for pk, row in rows().items() if condition(row)}


def figures(report: Report) -> dict[str, int]:
    """Return the counts that are not zero."""
    names = "processed failed discarded snoozed skipped stale lease_lost".split()
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def counts(**numbers: int) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number}


def work() -> Counter[int]:
    """Count what the handlers did in the database."""
    return Counter(int(note) for note in Parcel.objects.exclude(note="").values_list("note", flat=True))


def boundaries_of(name: str, audit: str, fails: int | None = None) -> list[Boundary]:
    """Run undisturbed, and return what is passed."""
    fresh(audit, fails)
    code, boundaries, report = victims.run(name, audit, frozenset(ROWS))
    assert code == 0
    assert report is not None
    expected = counts(processed=2 if fails else 3, failed=1 if fails else 0)
    assert figures(report) == expected
    assert effects() == Counter(ROWS)
    return boundaries


def kill_at_each(
    name: str, audit: str, check: Callable[[BatchProcessor[Errand], Left], None], fails: int | None = None
) -> None:
    """Kill the named processor at each of its boundaries, and check what is left."""
    boundaries = boundaries_of(name, audit, fails)
    for number, boundary in enumerate(boundaries):
        fresh(audit, fails)
        code, *_ = victims.run(name, audit, frozenset(ROWS), (number, boundary.name))
        try:
            assert code == -signal.SIGKILL
            left = Left.behind(boundaries[: number + 1])
            assert effects() == left.effects
            check(getattr(processors, name), left)
        except AssertionError as error:
            error.add_note(f"killed at {number} of {len(boundaries)}: {boundary.name}")
            raise


# --- which boundaries there are


TRANSACTION = ["lock", "SAVEPOINT", "UPDATE", "ROLLBACK TO", "the effect", "COMMIT"]
ROUGHLY = {
    "transactional": TRANSACTION,
    "transactional_spanning": TRANSACTION,
    "transactional_batch": TRANSACTION,
    "transactional_retry": TRANSACTION,
    "at_most_once": TRANSACTION,
    "claim": TRANSACTION,
    "lease": TRANSACTION,
}
