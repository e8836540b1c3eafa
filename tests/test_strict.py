"""With CI=true nothing may be left out: not by a test, a page, an option or an empty selection."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract import conftest as contract
from tests.environments import CHECKOUT

#: Collected where the database is another one, or by name only.
NOT_HERE = {
    "tests/explorer/everything.py",
    "tests/test_servers.py",
    *(f"tests/contract/{name}" for name in contract.collect_ignore),
}
BLOCK = re.compile(
    r"(?m)^ *(?:```(?:\{code-block\} )?|<!--- invisible-code-block: )(?:python|pycon|console)$"
)

#: The plugin without any other.
ALONE = ("-p", "tests.strict", "-p", "no:django", "-p", "no:hypothesispytest", "-p", "no:faker")


def run(folder: Path, *options: str, ci: bool, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}"]
    finished = subprocess.run(
        [*command, *options, str(folder)],
        cwd=CHECKOUT,
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "CI": str(ci).lower(),
            "DATABASE_URL": "sqlite://:memory:",
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(CHECKOUT),
            **variables,
        },
        text=True,
        check=False,
        timeout=60,
    )
    return finished.returncode, finished.stdout


@pytest.mark.parametrize(
    "written",
    [
        "def test(): pytest.skip('reason')",
        "@pytest.mark.skip(reason='reason')\ndef test(): pass",
        "pytest.skip('reason', allow_module_level=True)",
        "@pytest.mark.parametrize('none', [])\ndef test(none): pass",
        "def test(): pytest.xfail('reason')",
        "@pytest.mark.xfail\ndef test(): raise ValueError",
        "@pytest.mark.xfail\ndef test(): pass",
        "@pytest.mark.xfail(run=False)\ndef test(): pass",
    ],
)
def test_in_ci_a_test_that_does_not_count_fails(tmp_path: Path, written: str) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n{written}\n")
    code, said = run(tmp_path, *ALONE, ci=False)
    # 5: nothing was collected, because the whole module was skipped.
    assert code in {0, 5}, said
    code, said = run(tmp_path, *ALONE, ci=True)
    assert code in {1, 2}, said
    assert "with CI=true every test must run" in said


TWO = "def test_one(): pass\ndef test_two(): pass\n"


@pytest.mark.parametrize(
    ("options", "ci", "code", "words"),
    [
        (["-k", "one"], False, 0, "1 passed, 1 deselected"),
        (["-k", "one"], True, 1, "1 tests were deselected"),
        (["--expect-tests=2"], False, 0, "2 passed"),
        (["--expect-tests=3"], False, 1, "expected 3 tests, got 2"),
        (["--expect-tests=1"], False, 1, "expected 1 tests, got 2"),
        (["--expect-database=sqlite"], False, 0, "2 passed"),
        (["--expect-database=postgresql"], False, 4, "postgresql, got sqlite"),
        (["--expect-django=4.2"], False, 4, "expected Django 4.2, got"),
    ],
)
def test_a_run_that_did_something_else_than_it_should_fails(
    tmp_path: Path, options: list[str], ci: bool, code: int, words: str
) -> None:
    (tmp_path / "test_two.py").write_text(TWO)
    got, said = run(tmp_path, *ALONE, *options, ci=ci)
    assert got == code, said
    assert words in said


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
        if page.name != "tutorial.md":  # tests/docs/test_tutorial.py follows it
            yield str(page.relative_to(CHECKOUT)), len(BLOCK.findall(page.read_text()))
