"""The bounds of size and structure. They are lowered with each change that makes room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.environments import CHECKOUT
from tests.shape import Package

PACKAGE, TESTS = CHECKOUT / "dcl_processor", CHECKOUT / "tests"
CORE = PACKAGE / "core"

#: What puts core and edge together for users.
FRONT = {"dcl_processor.core", "dcl_processor.apps", "dcl_processor.decorator"}
FRONT |= {"dcl_processor.holdings", "dcl_processor.processor"}

#: Prints how many of the package's modules a first processor takes.
IMPORT = """
import sys
from dcl_processor import batch_processor
print(sum(name.partition(".")[0] == "dcl_processor" for name in sys.modules))
"""

OLD = Package.read(PACKAGE, without=frozenset({"core"}))
NEW, KEYS = Package.read(CORE), Package.read(CORE / "keys")


def imported() -> int:
    made = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return int(made.stdout)


@pytest.mark.parametrize(
    ("what", "weigh", "most", "goal"),
    [
        ("lines of the package", lambda: OLD.lines, 30_000, 15_000),
        ("modules of the package", lambda: len(OLD.modules), 166, 115),
        ("decisions of the package", lambda: OLD.decisions, 4_834, 2_350),
        ("lines of the tests", lambda: Package.read(TESTS).lines, 51_500, 24_000),
        ("modules that a first processor imports", imported, 85, 50),
        ("lines of the new core", lambda: NEW.lines - KEYS.lines, 8_000, 7_000),
        ("modules of the new core", lambda: len(NEW.modules) - len(KEYS.modules), 60, 50),
        ("decisions of the new core", lambda: NEW.decisions - KEYS.decisions, 1_350, 1_100),
        ("lines of its keys", lambda: KEYS.lines, 720, 600),
        ("modules of its keys", lambda: len(KEYS.modules), 6, 6),
        ("decisions of its keys", lambda: KEYS.decisions, 110, 100),
    ],
)
def test_it_does_not_grow(what: str, weigh: Callable[[], int], most: int, goal: int) -> None:
    now = weigh()
    print(f"{what}: {now:,}, at most {most:,}, to be {goal:,}")
    assert now <= most


def test_no_import_of_the_new_core_leads_in_a_circle() -> None:
    assert NEW.circle() == []


def test_the_new_core_imports_nothing_of_its_front() -> None:
    core = {name: found for name, found in NEW.imports().items() if name not in FRONT}
    assert {name: found & FRONT for name, found in core.items() if found & FRONT} == {}


def test_the_new_core_imports_nothing_of_the_rest_of_the_package() -> None:
    outside = {
        each
        for module in NEW.modules.values()
        for each in module.names()
        if each.startswith("dcl_processor") and not each.startswith("dcl_processor.core")
    }
    assert outside == set()


def test_no_function_and_no_module_of_the_new_core_is_too_long() -> None:
    functions = [each for module in NEW.modules.values() for each in module.functions()]
    assert {name: lines for name, lines in functions if lines > 41} == {}
    assert {each.name: each.lines for each in NEW.modules.values() if each.lines > 350} == {}
