"""The pages stay few and short, and each is reachable from the start page."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
PAGES = sorted(path for path in (CHECKOUT / "docs").glob("**/*.md") if "_build" not in path.parts)
LINK = re.compile(r"\]\(([^)#\s]+\.md)")


def linked(page: Path) -> set[Path]:
    return {(page.parent / each).resolve() for each in LINK.findall(page.read_text("utf-8"))}


def test_a_person_finishes_the_readme() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_the_pages_are_few_and_short() -> None:
    assert len(PAGES) <= 25
    assert sum(len(page.read_text("utf-8").split()) for page in PAGES) <= 28_000


def test_the_start_page_links_every_page() -> None:
    start = CHECKOUT / "docs" / "index.md"
    assert linked(start) | {start} >= {*PAGES}
    assert start in linked(README)


def test_the_readme_links_the_recipes_and_the_crash_table() -> None:
    recipes = {page for page in PAGES if page.parent.name == "recipes"}
    assert len(recipes) == 4
    assert linked(README) >= recipes
    assert "docs/howto/deliveries.md#what-a-crash-does" in README.read_text("utf-8")
