"""That the stages run all tests that there are."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

from tests.contract import conftest as contract
from tests.environments import CHECKOUT
from tests.mutants.listed import mutants
from tests.suite import stages

#: Collected where the database is another one, or by name only.
NOT_HERE = {*(f"tests/contract/{name}" for name in contract.collect_ignore)}
BLOCK = re.compile(
    r"(?m)^ *(?:```(?:\{code-block\} )?|<!--- invisible-code-block: )(?:python|pycon|console)$"
)

PAGES = {"README.md", *(str(each.relative_to(CHECKOUT)) for each in CHECKOUT.glob("docs/**/*.md"))}
FILES = {str(each.relative_to(CHECKOUT)) for each in CHECKOUT.glob("tests/**/test_*.py")} | PAGES


def files(kind: str) -> dict[str, set[str]]:
    """Return the files of tests and pages that each stage runs whole."""
    found: dict[str, set[str]] = {}
    for stage in stages(kind):
        named = {each for each in stage.files() if "::" not in each}
        left_out = {each.partition("::")[0] for each in stage.but}
        assert all((CHECKOUT / each).exists() for each in named | left_out), stage.name
        inside = {file for file in FILES if any(is_in(file, each) for each in named)}
        found[stage.name] = {
            file for file in inside if not any(is_in(file, each) for each in stage.but)
        }
    return found


def is_in(file: str, folder: str) -> bool:
    return file == folder or file.startswith(f"{folder}/")


def test_the_gate_and_the_long_suite_are_all_tests() -> None:
    """And the long suite alone is, with every set of parameters."""
    for kind in ("", "long"):
        assert set().union(*files(kind).values()) == FILES


def test_no_entry_of_the_list_of_mutants_is_stale() -> None:
    assert len(listed := list(mutants())) >= 140
    assert not [str(each) for each in listed if each.stale()]


def test_every_test_that_is_written_is_collected() -> None:
    """A file's name, a second function of one name, or a class may hide it from pytest."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--color=no"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split("::") for line in listed.stdout.splitlines() if "::" in line]
    collected = Counter((path, name.partition("[")[0]) for path, *_, name in lines)
    assert set(_tests()) - set(collected) == set()
    for stage in stages(""):
        names = {each for each in stage.but if "::" in each}
        assert names <= {f"{path}::{name}" for path, name in collected}, stage.name
    blocks = Counter(path for path, *_ in lines if path.endswith(".md"))
    assert {page: blocks[page] for page, _ in _pages()} == dict(_pages())


def _tests() -> Iterator[tuple[str, str]]:
    """Yield file and name of each test, but not those that a module defines under a condition."""
    for path in CHECKOUT.glob("tests/**/*.py"):
        name = str(path.relative_to(CHECKOUT))
        module = ast.parse(path.read_text()).body if name not in NOT_HERE else []
        bodies = [module, *(each.body for each in module if isinstance(each, ast.ClassDef))]
        for node in itertools.chain.from_iterable(bodies):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield name, node.name


def _pages() -> Iterator[tuple[str, int]]:
    """Yield each page with the number of its blocks of code."""
    for page in [CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md")]:
        if page.name != "tutorial.md":  # tests/docs/test_adopt.py follows it
            yield str(page.relative_to(CHECKOUT)), len(BLOCK.findall(page.read_text()))
