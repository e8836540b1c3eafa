"""Words that made sentences hard to read, and were replaced by names and standard terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
RETIRED = {
    "whoever, somebody, nobody, anybody": r"whoever|somebody|nobody|anybody",
    "a pronoun for who receives a message": r"(is|are|be|been|was|were) told",
    "in vain": r"in vain",
    "mend, for fix": r"mend(s|ed|ing)?",
    "for ever": r"for ever",
}
PAGES = sorted(
    path
    for where in ("*.md", "docs/*.md", "docs/*/*.md", "dcl_processor/**/*.py")
    for path in CHECKOUT.glob(where)
)


def uses(word: str) -> list[str]:
    pattern = re.compile(rf"(?<![\w.])({word})(?![\w(])", re.IGNORECASE)
    return [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for path in PAGES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", RETIRED.values(), ids=RETIRED)
def test_neither_the_pages_nor_the_code_use_a_retired_word(word: str) -> None:
    assert len(PAGES) > 150
    assert not uses(word)


def test_in_pages_a_process_is_a_worker() -> None:
    """``copies`` is the name of an option, and a copy may be one of a row, a file or a message."""
    process = re.compile(r"\b(another|other|each|every|one|two|several|four) cop(y|ies)\b")
    found = [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for path in PAGES
        if path.suffix == ".md"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if process.search(line.replace("`", ""))
    ]
    assert not found
