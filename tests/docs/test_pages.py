"""The pages stay few and short, and each is reachable from the start page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dcl_processor import alive, backlog, report
from dcl_processor.candidates import scan
from dcl_processor.contrib.reservations import reservation
from dcl_processor.definition import retry
from dcl_processor.engine import source
from dcl_processor.execution import calls
from dcl_processor.ledger import desk, records, tables
from dcl_processor.processes import monitor, supervisor
from dcl_processor.runner import counters, holds
from dcl_processor.watch import polling
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


# --- each promise names the tests that show it, and these tests exist


PAGE = (CHECKOUT / "docs" / "explanation" / "promises.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("module", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_test_that_the_page_names_exists(module: str, name: str) -> None:
    tree = ast.parse((CHECKOUT / module).read_text(encoding="utf-8"))
    assert name in {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def promises() -> list[str]:
    return re.findall(r"^## (I\d+): ", PAGE, re.MULTILINE)


def test_every_promise_has_tests_beside_it() -> None:
    assert promises() == [f"I{number}" for number in range(1, 27)]
    shown = re.findall(r"^- (I\d+)(?:, .*)?:\n  - `tests/", PAGE, re.MULTILINE)
    assert set(shown) == set(promises())


def test_every_test_that_carries_a_promise_in_its_name_carries_one_that_there_is() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "tests").rglob("*.py"))
    carried = {f"I{number}" for number in re.findall(r"^ *def test_i(\d+)_", tests, re.MULTILINE)}
    assert carried == set(promises())


# --- numbers that pages have in their sentences are those of the code


WORD: dict[float, str] = {3: "three", 10: "ten", 60: "a minute"}

SENTENCES = {
    "README.md": [
        f"Python {ENVIRONMENTS[0].python} to {ENVIRONMENTS[-1].python}; "
        "Django {}, {} and {}.".format(*(each.django for each in ENVIRONMENTS))
    ],
    "docs/howto/run.md": [
        f"the wait grows to {WORD[polling.MOST_INTERVALS]} intervals",
        f"kills it {WORD[calls.GRACE]} seconds after the limit",
        f"moved in the last {WORD[monitor.SILENT]} seconds",
        f"named by a warning after {monitor.FIRST_WARNING / 60:g}, ",
        f"--max-age {alive.MAX_AGE:g}",
        f"after further deaths within {WORD[supervisor.LIVED_LONG]} with a backoff",
    ],
    "docs/howto/failures.md": [
        f"ends after {counters.MOST_FROM_THE_START} failures",
        f"up to {counters.MOST_FAILURES} in a run",
    ],
    "docs/howto/define.md": [f"within windows of {scan.WINDOW} rows"],
    "docs/howto/operate.md": [
        f"A run waits up to {holds.LONGEST:g} seconds",
        f"`True` for {holds.PAUSE:g} seconds",
        f"Orders wait {tables.LOCK_WAIT:g} seconds for a lock",
        f"deleted after {records.KEEP.days} days",
        f"`lost` after {WORD[records.LOST_AFTER]} without a heartbeat",
        f"after {desk.PATIENCE:g} seconds once",
        f"counted up to {backlog.MOST:,}",
    ],
    "docs/explanation/promises.md": [f"at most {source.MOST_LOCKED:,}, for `wait_for_locked`"],
    "docs/reference/processors.md": [
        f"of which {retry.LONGEST_ERROR:,} characters are used",
        f"up to {reservation.MOST:,} rows, a `Reservation` each",
    ],
    "docs/reference/results.md": [f"counted up to {report.MOST_COUNTED:,}"],
}


@pytest.mark.parametrize("page", SENTENCES)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    text = " ".join((CHECKOUT / page).read_text(encoding="utf-8").split())
    assert [each for each in SENTENCES[page] if each not in text] == []
