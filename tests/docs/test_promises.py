"""Each promise names the tests that show it, and these tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
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
