"""Pages fit a screen: code does not scroll sideways, and a table's cell has one figure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.signatures import WIDTH

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("**/*.md"))]
TABLES = [*PAGES, *sorted((CHECKOUT / "docs").glob("**/*.inc"))]

#: The languages of blocks that a page shows as code. ``WIDTH`` columns of them take 656 of the
#: 688 pixels that the theme gives to code in a window of 720, and of the 736 in one of 1,400.
CODE = {"python", "pycon", "console", "sh", "text", "ini"}
FENCE = re.compile(r"^```(?:\{code-block\} )?(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"\d[\d,.]*")


def code(page: Path) -> Iterator[str]:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in CODE:
            yield from block.splitlines()


def cells(page: Path) -> Iterator[str]:
    """Yield the cells behind a line's label, without the targets of links."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            text = re.sub(r"\]\([^)]*\)", "]", line)
            yield from (cell.strip(" *") for cell in re.split(r"(?<!\\)\|", text)[2:-1])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_of_code_is_wider_than_its_column(page: Path) -> None:
    assert [line for line in code(page) if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", TABLES, ids=lambda page: page.name)
def test_a_cell_that_begins_with_a_figure_has_no_other(page: Path) -> None:
    assert [
        cell for cell in cells(page) if len(FIGURE.findall(cell)) > 1 and cell[0].isdigit()
    ] == []


def test_the_pages_have_code_and_figures() -> None:
    assert sum(1 for page in PAGES for _ in code(page)) > 1_000
    assert sum(cell[:1].isdigit() for page in TABLES for cell in cells(page)) > 300
