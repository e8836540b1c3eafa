"""The inner loop: style, types, and the part of the contract that is fast, on PostgreSQL.

``make test`` has the rest: what waits for clocks, or compiles every question.
"""

from __future__ import annotations

import sys
import time

from tests.environments import CHECKOUT
from tests.progress import Progress, Report
from tests.suite import FOLDER, Run, Stage, stages

#: Files of the contract that take most of its time.
SLOW = frozenset(
    f"test_{name}.py"
    for name in (
        "clock_changes",
        "kit_race",
        "leases",
        "lost_transactions",
        "own_row",
        "shapes",
        "shapes_wanted",
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
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = fast_files()
    listed = [
        Stage("one half", "the fast tests", 90, tests=tuple(files[::2])),
        Stage("other half", "the fast tests", 90, tests=tuple(files[1::2])),
        *(each for each in stages("gate") if each.name == "lint"),
    ]
    report = Report(factor=1.0)
    progress = Progress(time.monotonic(), [each.name for each in listed])
    Run("gate").all(listed, progress, report)
    report.print(FOLDER)
    return int(report.is_red())


if __name__ == "__main__":
    sys.exit(main())
