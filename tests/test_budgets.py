"""The weight of the project: no figure may grow, and each is printed beside what it is to be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import CHECKOUT

PACKAGE, TESTS = CHECKOUT / "dcl_processor", CHECKOUT / "tests"

#: Prints how many of the package's modules a first processor takes.
IMPORT = """
import sys
from dcl_processor import batch_processor
print(sum(name.partition(".")[0] == "dcl_processor" for name in sys.modules))
"""


def lines(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def modules(folder: Path) -> int:
    return len([*folder.rglob("*.py")])


def imported() -> int:
    made = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return int(made.stdout)


@pytest.mark.parametrize(
    ("what", "weigh", "most", "goal"),
    [
        ("lines of the package", lambda: lines(PACKAGE), 38_695, 12_500),
        ("modules of the package", lambda: modules(PACKAGE), 262, 85),
        ("lines of the tests", lambda: lines(TESTS), 68_490, 26_000),
        ("modules that a first processor imports", imported, 111, 40),
    ],
)
def test_it_does_not_grow(what: str, weigh: Callable[[], int], most: int, goal: int) -> None:
    now = weigh()
    print(f"{what}: {now:,}, at most {most:,}, to be {goal:,}")
    assert now <= most
