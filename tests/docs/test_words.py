"""Words that made sentences hard to read, and were replaced by names and standard terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
RETIRED = {
    "whoever, somebody, nobody, anybody, everybody": r"whoever|(some|no|any|every)body",
    "a pronoun for who receives a message": r"(is|are|be|been|being|was|were) told",
    "by itself, for alone": r"by (itself|themselves)",
    "in vain": r"in vain",
    "mend, for fix": r"mend(s|ed|ing)?",
    "for ever": r"for ever",
}
PAGES = sorted(
    path
    for where in ("*.md", "docs/**/*.md", "docs/**/*.inc", "docs/**/*.svg")
    for path in CHECKOUT.glob(where)
    if "_build" not in path.parts
)
CODE = sorted(
    path
    for where in (
        "dcl_processor/**/*.py",
        "dcl_processor/**/*.html",
        "sample_app/**/*.py",
        "tests/**/*.py",
        "pyproject.toml",
    )
    for path in CHECKOUT.glob(where)
    if path != Path(__file__)
)

PROCESS = re.compile(
    r"\bcopies\b|\b[Cc]opy [AB]\b|\b(another|other|each|every|one|this) copy\b|\bcopy's\b"
)


def uses(word: str, paths: list[Path]) -> list[str]:
    # In backquotes, quotes or an address, ``nobody`` is an account of the system.
    pattern = re.compile(rf"(?<![\w.`\"/])({word})(?![\w(])", re.IGNORECASE)
    return [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", RETIRED.values(), ids=RETIRED)
def test_neither_the_pages_nor_the_code_use_a_retired_word(word: str) -> None:
    assert len(PAGES) > 30
    assert len(CODE) > 250
    assert not uses(word, [*PAGES, *CODE])


def test_in_pages_a_process_is_a_worker() -> None:
    """A copy may be one of a row, a file or a message."""
    found = [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for path in PAGES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PROCESS.search(line)
    ]
    assert not found
