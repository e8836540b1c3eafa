"""The suite's promises: each test is run, and only a wait that ran out is repeated."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import suite
from tests.contract import conftest as contract
from tests.environments import CHECKOUT
from tests.mutants.listed import mutants
from tests.progress import Progress, Report
from tests.suite import Run, Stage, stages

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


# --- verdicts


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder of the checkout, so that its conftest.py holds there."""
    build = CHECKOUT / "build"
    build.mkdir(exist_ok=True)
    monkeypatch.setenv("CI", "true")
    with tempfile.TemporaryDirectory(dir=build) as name:
        monkeypatch.setattr(suite, "FOLDER", Path(name))
        yield Path(name)


BEGIN = """
import logging, pathlib
from tests.waiting import Late
runs = pathlib.Path(__file__).with_suffix(".runs")
def number():
    with runs.open("a") as file: file.write("x")
    return len(runs.read_text())
"""
LATE_ONCE = "def test_late():\n    if number() == 1: raise Late('a row')\n"
LATE_TWICE = "def test_late():\n    if number() in (1, 3): raise Late('a row')\n"
WRONG_LATER = (
    "def test_late():\n    if number() == 1: raise Late('a row')\n    assert number() < 4\n"
)
WRONG_ONCE = (
    "def test_wrong():\n    logging.getLogger().error('ERROR tests/no.py was printed')\n"
    "    assert number() != 1\n"
)


def judged(folder: Path, written: str, count: int | None = None) -> tuple[Report, str]:
    """Run a stage of one module to its verdict; return that, and what was printed."""
    module = folder / "test_it.py"
    module.write_text(BEGIN + written)
    stage = Stage("moon", "", 60, tests=(str(module.relative_to(CHECKOUT)),), count=count)
    report = Report(1.0)
    Run("gate").all([stage], Progress(time.monotonic(), ["moon"]), report)
    return report, (folder / "test_it.runs").read_text()


def test_a_test_that_was_late_passes_if_it_does_so_three_times_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, runs = judged(folder, LATE_ONCE, count=1)
    assert (report.is_red(), len(runs)) == (False, 4)
    report.print(folder)
    out = capsys.readouterr().out
    assert "LATE moon: build/" in out
    assert "expected a row within" in out
    assert out.endswith("=== GREEN, 1 were late and passed three times alone\n")


@pytest.mark.parametrize("written", [LATE_TWICE, WRONG_LATER])
def test_one_failure_of_the_three_is_final(folder: Path, written: str) -> None:
    report, _ = judged(folder, written)
    assert report.is_red()


@pytest.mark.parametrize("written", [WRONG_ONCE, WRONG_ONCE + LATE_ONCE])
def test_every_other_failure_is_final_at_once(
    folder: Path, written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report, runs = judged(folder, written)
    assert report.is_red()
    assert len(runs) <= 2
    report.print(folder)
    lines = capsys.readouterr().out.partition("\nFAILED")[2].splitlines()
    assert lines[0].endswith("::test_wrong")
    assert not any(line.startswith(("FAILED ERROR", "ERROR")) for line in lines)
    assert lines[1].endswith("/test_it.py:10: assert number() != 1")
    assert any("| ERROR    root:test_it.py:9 ERROR tests/no.py" in line for line in lines)
    assert any("python -m tests.suite 'moon'" in line for line in lines)
