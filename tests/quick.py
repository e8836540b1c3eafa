"""The inner loop: style, types, and the part of the contract that is fast, on PostgreSQL.

``make test`` has the rest: what waits for clocks, generates histories, or compiles every question.
"""

from __future__ import annotations

import os
import sys

from tests.environments import CHECKOUT
from tests.progress import side_by_side

#: Files of the contract that take most of its time.
SLOW = frozenset(
    f"test_{name}.py"
    for name in (
        "clock_changes",
        "garbage",
        "histories",
        "kit_race",
        "leases",
        "lost_transactions",
        "own_row",
        "shapes",
        "shapes_wanted",
        "shapes_one_statement",
        "shapes_race",
        "shapes_windows",
        "wrong_flips",
    )
)


def fast_files() -> list[str]:
    """Return the files of the contract but the slow ones, and those of single modules."""
    tests = CHECKOUT / "tests"
    contract = (each for each in tests.glob("contract/test_*.py") if each.name not in SLOW)
    modules = ("limits", "definition", "deliveries", "grouping", "locking", "question", "retry")
    files = [*contract, *(tests / f"test_{name}.py" for name in modules)]
    return sorted(str(each.relative_to(CHECKOUT)) for each in files)


def main() -> int:
    """Return 1 if something is wrong."""
    files = fast_files()
    pytest = (sys.executable, "-m", "pytest", "-q")
    commands = {
        "tests, one half": (*pytest, *files[::2]),
        "tests, other half": (*pytest, *files[1::2]),
        "lint": (sys.executable, "-m", "tests.suite", "lint"),
    }
    return side_by_side(commands, most=1 + (os.cpu_count() or 1))


if __name__ == "__main__":
    sys.exit(main())
