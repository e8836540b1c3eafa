"""The pages stay few and short, and each is reachable from the start page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcl_processor import alive
from dcl_processor.contrib import reservations
from dcl_processor.engine import source
from dcl_processor.insights import status
from dcl_processor.ledger import records, run
from dcl_processor.options import retry
from dcl_processor.pending import scan
from dcl_processor.report import counters, report
from dcl_processor.workers import health
from tests.docs.signatures import WIDTH
from tests.environments import ENVIRONMENTS

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
PAGES = sorted(path for path in (CHECKOUT / "docs").glob("**/*.md") if "_build" not in path.parts)
LINK = re.compile(r"\]\(([^)#\s]+\.md)")


def linked(page: Path) -> set[Path]:
    return {(page.parent / each).resolve() for each in LINK.findall(page.read_text("utf-8"))}


def test_a_person_finishes_the_readme() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_the_pages_are_few_and_short() -> None:
    assert len(PAGES) <= 29
    assert sum(len(page.read_text("utf-8").split()) for page in PAGES) <= 17_000


def test_the_start_page_links_every_page() -> None:
    start = CHECKOUT / "docs" / "index.md"
    assert linked(start) | {start} >= {*PAGES}
    assert start in linked(README)


def test_the_readme_links_the_recipes_and_the_crash_table() -> None:
    recipes = {page for page in PAGES if page.parent.name == "recipes"}
    assert len(recipes) == 4
    assert linked(README) >= recipes
    assert "docs/howto/deliveries.md#what-a-crash-does" in README.read_text("utf-8")


# --- each promise has tests that carry its number in their names


PAGE = (CHECKOUT / "docs" / "explanation" / "promises.md").read_text(encoding="utf-8")


def promises() -> list[str]:
    return re.findall(r"^## (I\d+): ", PAGE, re.MULTILINE)


def test_every_promise_is_on_the_page() -> None:
    # Of 19 and 23, nothing is promised any more.
    assert promises() == [f"I{number}" for number in range(1, 25) if number not in {19, 23}]


def test_every_promise_has_tests_that_carry_its_number() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("*.py"))
    carried = {f"I{number}" for number in re.findall(r"^ *def test_i(\d+)_", tests, re.MULTILINE)}
    assert carried == set(promises())


# --- numbers that pages have in their sentences are those of the code


WORD: dict[float, str] = {10: "ten", 60: "a minute"}

SENTENCES = {
    "README.md": [
        f"Python {ENVIRONMENTS[0].python} to {ENVIRONMENTS[-1].python}; "
        "Django {}, {} and {}.".format(*(each.django for each in ENVIRONMENTS))
    ],
    "docs/howto/run.md": [
        f"ends its own process {health.GRACE} seconds later",
        f"--max-age {alive.MAX_AGE:g}",
    ],
    "docs/howto/failures.md": [
        f"ends after {counters.MOST_FROM_THE_START} failures",
        f"up to {counters.MOST_FAILURES} in a run",
    ],
    "docs/howto/define.md": [f"window of {scan.WINDOW} rows"],
    "docs/howto/operate.md": [f"counted up to {status.MOST:,}"],
    "docs/howto/ledger.md": [
        f"A run waits up to {run.PATIENCE:g} seconds",
        f"deleted after {records.KEEP.days} days",
        f"follow each other within {WORD[run.GO_ON_WITHIN]}",
        f"and every {run.WRITE_EVERY:g} seconds before",
        f"goes on without them for {run.SILENCE:g} seconds",
    ],
    "docs/explanation/promises.md": [f"at most {source.MOST_LOCKED:,}, for `wait_for_locked`"],
    "docs/reference/processors.md": [
        f"of which {retry.LONGEST_ERROR:,} characters are used",
        f"up to {reservations.MOST:,} rows, a `Reservation` each",
    ],
    "docs/reference/results.md": [f"counted up to {report.MOST_COUNTED:,}"],
}


@pytest.mark.parametrize("page", SENTENCES)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    text = " ".join((CHECKOUT / page).read_text(encoding="utf-8").split())
    assert [each for each in SENTENCES[page] if each not in text] == []


# --- pages fit a screen: code does not scroll sideways


#: The languages of blocks that a page shows as code. ``WIDTH`` columns of them take 656 of the
#: 688 pixels that the theme gives to code in a window of 720, and of the 736 in one of 1,400.
CODE = {"python", "pycon", "console", "sh", "text", "ini"}
FENCE = re.compile(r"^```(?:\{code-block\} )?(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(page: Path) -> Iterator[str]:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in CODE:
            yield from block.splitlines()


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_no_line_of_code_is_wider_than_its_column(page: Path) -> None:
    assert [line for line in code(page) if len(line) > WIDTH] == []


# --- each race has its lines, its comments and its test, and CONTRIBUTING lists them all


PACKAGE = CHECKOUT / "dcl_processor"
RACES = [
    "double claim",
    "stale second check",
    "lock on joined rows",
    "flip without work",
    "work without flip",
    "lost lease that writes",
    "two of one key",
    "overtaking",
    "poison row",
    "key that is passed",
    "worker over the cap",
    "two orders",
    "over the rate",
    "endless run",
]
CONTRIBUTING = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([\w ]+) \| [^|]+ \| ([^|]+) \| `([\w/.]+)::(\w+)` \|$", re.MULTILINE)


def commented() -> dict[str, set[str]]:
    """Return the files in which a comment names each race."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for race in re.findall(r"# Race: ([\w ]+)\.", path.read_text(encoding="utf-8")):
            files[race].add(str(path.relative_to(PACKAGE)))
    return files


def test_the_table_lists_each_race_with_the_files_whose_comments_name_it() -> None:
    table = {
        race: set(re.findall(r"`([\w/]+\.py)`", files))
        for race, files, _, _ in ROW.findall(CONTRIBUTING)
    }
    assert list(table) == RACES
    assert table == commented()


def test_each_race_has_a_test() -> None:
    for race, _, module, name in ROW.findall(CONTRIBUTING):
        tree = ast.parse((CHECKOUT / module).read_text(encoding="utf-8"))
        tests = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        assert name in tests, race


def test_a_comment_stands_above_code() -> None:
    """Not above nothing, as it would after the line that it is about was moved."""
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if "# Race:" in line:
                below = (each.strip() for each in lines[number + 1 :])
                assert next(each for each in below if not each.startswith("#")), (path, number)


def test_the_map_names_each_folder() -> None:
    named = re.findall(
        r"`(\w+)/`", CONTRIBUTING.partition("## A map of the code")[2].partition("\n## ")[0]
    )
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {*named} == {*folders} - {"contrib"} | {"dcl_processor"}


def test_what_the_table_of_places_names_is_there() -> None:
    places = CONTRIBUTING.partition("\nWhere is it?\n")[2].partition("\n`tests/")[0]
    named = re.findall(r"`([\w/]+\.py)(?::(\w+))?`", places)
    assert len(named) > 20
    for path, name in named:
        folder = CHECKOUT if path.startswith("tests/") else PACKAGE
        text = (folder / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(def |class |){name}\b", text, re.MULTILINE), (path, name)


# --- words that made sentences hard to read, and were replaced by names and standard terms


RETIRED = {
    "whoever, somebody, nobody, anybody, everybody": r"whoever|(some|no|any|every)body",
    "a pronoun for who receives a message": r"(is|are|be|been|being|was|were) told",
    "by itself, for alone": r"by (itself|themselves)",
    "in vain": r"in vain",
    "mend, for fix": r"mend(s|ed|ing)?",
    "for ever": r"for ever",
}
WRITTEN = sorted(
    path
    for where in (
        *("*.md", "docs/**/*.md", "docs/**/*.inc", "docs/**/*.svg", "pyproject.toml"),
        *(
            "dcl_processor/**/*.py",
            "dcl_processor/**/*.html",
            "sample_app/**/*.py",
            "tests/**/*.py",
        ),
    )
    for path in CHECKOUT.glob(where)
    if "_build" not in path.parts and path != Path(__file__)
)


def uses(word: str) -> list[str]:
    # In backquotes, quotes or an address, ``nobody`` is an account of the system.
    pattern = re.compile(rf"(?<![\w.`\"/])({word})(?![\w(])", re.IGNORECASE)
    return [
        f"{path.relative_to(CHECKOUT)}:{number}: {line.strip()}"
        for path in WRITTEN
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.parametrize("word", RETIRED.values(), ids=RETIRED)
def test_neither_the_pages_nor_the_code_use_a_retired_word(word: str) -> None:
    assert len(WRITTEN) > 280
    assert not uses(word)
