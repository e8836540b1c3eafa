"""What has happened when something was killed at a boundary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.crash.rows import FIRST, ROWS, SECOND
from tests.crash.trace import Boundary

# Between the end of a statement and the beginning of the next nothing happens that would outlive
# the process: one of the two is enough, but for these, for which people look.
KEPT = ("before COMMIT", "before the effect")


@dataclass
class Left:
    """What has happened when a process died, by row."""

    rows: frozenset[int]
    claimed: set[int]
    effects: Counter[int]
    settled: set[int]

    @classmethod
    def behind(cls, rows: frozenset[int], passed: Sequence[Boundary]) -> Left:
        left = cls(rows, set(), Counter(), set())
        for boundary in passed:
            if boundary.name == "after the effect":
                left.effects.update(boundary.pks)
            elif boundary.commits:
                acted = boundary.pks & left.effects.keys()
                left.settled |= acted
                left.claimed |= boundary.pks - acted
        return left


def rows_of(name: str) -> frozenset[int]:
    """Have one row behind the first, and one behind a batch of two."""
    return frozenset(ROWS if "batch" in name else (FIRST, SECOND))
