"""What has happened when something was killed at a boundary."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcl_processor import BatchProcessor
from tests.crash import processors, victims
from tests.crash.audit import effects
from tests.crash.rows import FIRST, ROWS, SECOND, fresh
from tests.crash.trace import Boundary
from tests.shares import has_point

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


def tried(boundaries: Sequence[Boundary], search: str) -> Iterator[tuple[int, str]]:
    """Yield the numbers and names of the boundaries at which this run of the tests ends something.

    ``search``: names what is ended, for the share of the boundaries that is tried.
    """
    for number, boundary in enumerate(boundaries):
        is_needed = not boundary.name.startswith("before") or boundary.name in KEPT
        if (number == 0 or is_needed) and has_point(number, search, of=3):
            yield number, boundary.name


def kill_at_each(
    name: str,
    audit: str,
    boundaries: Sequence[Boundary],
    check: Callable[[BatchProcessor[Any], Left], None],
    *,
    all_rows: frozenset[int],
    fails: int | None = None,
) -> None:
    """Kill a process at each of its boundaries, and check what is left."""
    processor = getattr(processors, name)
    for at in tried(boundaries, f"killed in run, {name}"):
        fresh(*all_rows, fails=fails)
        Path(audit).write_text("")
        code, passed, result = victims.run(name, audit, all_rows, at)
        try:
            assert code == -signal.SIGKILL
            left = Left.behind(all_rows, boundaries[: at[0] + 1])
            assert effects() == left.effects
            check(processor, left)
        except AssertionError as error:
            error.add_note(f"killed at {at[0]} of {len(boundaries)}: {at[1]}; exit code {code}")
            error.add_note(f"passed: {[each.name for each in passed]}; {result}")
            raise
