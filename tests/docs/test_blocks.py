"""A block that is wrong has to fail: otherwise the pages prove nothing."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
from sybil import Document
from sybil.example import SybilFailure

from tests.docs.blocks import FOLLOWED, PARSERS
from tests.docs.output import difference

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(?:\{code-block\} )?(\w+)", re.MULTILINE)


def evaluate(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(dedent(text), encoding="utf-8")
    for example in Document.parse(str(page), *PARSERS).examples():
        example.evaluate()


def test_python_blocks_of_a_page_share_names(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="two"):
        evaluate(
            tmp_path,
            """
            ```python
            answer = 1
            ```
            ```python
            assert answer == 2, "two"
            ```
            """,
        )


def test_hidden_blocks_are_executed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="hidden"):
        evaluate(
            tmp_path,
            """
            <!--- invisible-code-block: python
            raise AssertionError("hidden")
            --->
            """,
        )


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ("2\n", "Expected:\n    2\nGot:\n    1"),
        ("", "Expected nothing"),
        ("Traceback (most recent call last):\n    ...\nValueError: no\n", "Got:\n    1"),
    ],
)
def test_a_session_with_another_output_fails(tmp_path: Path, shown: str, problem: str) -> None:
    with pytest.raises(SybilFailure, match=re.escape(problem)):
        evaluate(tmp_path, f"```pycon\n>>> 1\n{shown}```\n")


@pytest.mark.django_db(databases="__all__")
def test_a_command_with_another_output_fails(tmp_path: Path) -> None:
    with pytest.raises(SybilFailure, match="the page shows:\nwrong"):
        evaluate(tmp_path, "```console\n$ python manage.py check\nwrong\n```\n")


@pytest.mark.django_db(databases="__all__")
def test_a_command_with_another_exit_code_fails(tmp_path: Path) -> None:
    with pytest.raises(SybilFailure, match="the page shows:\n1"):
        evaluate(
            tmp_path,
            """
            ```console
            $ python manage.py check
            System check identified no issues (0 silenced).
            $ echo $?
            1
            ```
            """,
        )


def test_a_command_that_is_no_manage_py_is_not_taken_for_one(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape("got '$ ls'")):
        evaluate(tmp_path, "```console\n$ ls\n```\n")


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("3 processed in 0.02 s\n", "3 processed in 17.40 s\n", True),
        ("3 processed in 0.02 s\n", "4 processed in 0.02 s\n", False),
        ("(2 workers: 26, 24)\n", "(2 workers: 8, 42)\n", True),
        ("(2 workers: 26, 24)\n", "(2 workers: 50, 0)\n", False),
        ("5 processed, 44 stale\n", "5 processed, 7 stale\n", True),
        ("5 processed, 44 stale\n", "5 processed\n", False),
        ("a long\nline\n", "a long line\n", True),
        ("a  column\n", "a column\n", False),
    ],
)
def test_only_durations_line_breaks_and_how_copies_met_may_differ(
    want: str, got: str, same: bool
) -> None:
    assert (difference(want, got) is None) is same


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_executed_or_says_that_it_is_not_python(page: Path) -> None:
    """No language that a reader would take for a checked example goes unchecked."""
    not_executed = {"sh", "text", "ini", "yaml", "include", "toctree", "figure", "glossary"}
    languages = set(FENCE.findall(page.read_text(encoding="utf-8")))
    assert languages <= {"python", "pycon", "console"} | not_executed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_that_shows_files_is_followed_by_a_test(page: Path) -> None:
    shows_files = "} python\n:caption: " in page.read_text(encoding="utf-8")
    assert shows_files == page.as_posix().endswith(FOLLOWED)
    tests = "".join(each.read_text(encoding="utf-8") for each in Path(__file__).parent.glob("*.py"))
    name = page.relative_to(CHECKOUT / "docs") if shows_files else None
    assert name is None or f'Reader("{name}"' in tests or f'"{name}": Recipe(' in tests
