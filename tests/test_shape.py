"""The bounds of size and structure. They are lowered with each change that makes room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest

from tests.environments import CHECKOUT
from tests.shape import Module, Package

PACKAGE, TESTS = CHECKOUT / "dcl_processor", CHECKOUT / "tests"

CORE = ("options", "pending", "keys", "sql", "engine", "report")

#: What puts core and edge together for users.
FRONT = {"dcl_processor", *(f"dcl_processor.{each}" for each in ("apps", "decorator", "processor"))}

#: Public names of the core, each in a module of its own.
NAMES = {f"dcl_processor.{each}" for each in ("columns", "exceptions", "signals")}

#: Prints how many of the package's modules a first processor takes.
IMPORT = """
import sys
from dcl_processor import batch_processor
print(sum(name.partition(".")[0] == "dcl_processor" for name in sys.modules))
"""

ALL = Package.read(PACKAGE)


def rooms(*names: str) -> dict[str, Module]:
    """Return the modules of some rooms, by their names."""
    return {
        name: each
        for name, each in ALL.modules.items()
        if name.split(".")[1:2] in [[room] for room in names]
    }


KEYS = rooms("keys")
INNER = rooms(*[each for each in CORE if each != "keys"])
EDGE = {
    name: each
    for name, each in ALL.modules.items()
    if not (name in KEYS or name in INNER or name in FRONT or name in NAMES)
}


def lines(modules: dict[str, Module]) -> int:
    return sum(each.lines for each in modules.values())


def decisions(modules: dict[str, Module]) -> int:
    return sum(each.decisions for each in modules.values())


def imported() -> int:
    made = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
    )
    return int(made.stdout)


@pytest.mark.parametrize(
    ("what", "weigh", "most", "goal"),
    [
        ("lines of the package", lambda: ALL.lines, 16_252, 15_000),
        ("lines of the core", lambda: lines(INNER), 7_977, 7_000),
        ("modules of the core", lambda: len(INNER), 53, 50),
        ("decisions of the core", lambda: decisions(INNER), 1_314, 1_100),
        ("lines of keys", lambda: lines(KEYS), 707, 600),
        ("modules of keys", lambda: len(KEYS), 5, 6),
        ("decisions of keys", lambda: decisions(KEYS), 92, 100),
        ("lines of the edge", lambda: lines(EDGE), 6_845, 7_000),
        ("modules of the edge", lambda: len(EDGE), 49, 55),
        ("decisions of the edge", lambda: decisions(EDGE), 844, 1_000),
        ("lines of the tests", lambda: Package.read(TESTS).lines, 38_000, 24_000),
        ("modules that a first processor imports", imported, 21, 50),
    ],
)
def test_it_does_not_grow(what: str, weigh: Callable[[], int], most: int, goal: int) -> None:
    now = weigh()
    print(f"{what}: {now:,}, at most {most:,}, to be {goal:,}")
    assert now <= most


def test_no_import_leads_in_a_circle() -> None:
    assert ALL.circle() == []


def outside(modules: Iterable[Module], allowed: Iterable[str]) -> set[str]:
    """Return what the modules import of the package besides the allowed rooms."""
    known = tuple(f"dcl_processor.{each}" for each in allowed)
    named = {each for module in modules for each in module.names()}
    return {
        each
        for each in named
        if each.startswith("dcl_processor.")
        and not f"{each}.".startswith(tuple(f"{k}." for k in known))
    }


def test_the_core_imports_nothing_of_the_front_and_nothing_of_the_edge() -> None:
    assert outside([*INNER.values(), *KEYS.values()], CORE) == set()


def test_no_function_and_no_module_of_the_core_is_too_long() -> None:
    core = [*INNER.values(), *KEYS.values()]
    functions = [each for module in core for each in module.functions()]
    assert {name: lines for name, lines in functions if lines > 41} == {}
    assert {each.name: each.lines for each in core if each.lines > 350} == {}
