"""Each race has its lines, its comments and its test, and CONTRIBUTING lists them all."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
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
    "worker over the cap",
    "two orders",
    "two probes",
    "over the rate",
    "late answer",
    "endless run",
]
PAGE = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
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
        race: set(re.findall(r"`([\w/]+\.py)`", files)) for race, files, _, _ in ROW.findall(PAGE)
    }
    assert list(table) == RACES
    assert table == commented()


def test_each_race_has_a_test() -> None:
    for race, _, module, name in ROW.findall(PAGE):
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
    named = re.findall(r"`(\w+)/`", PAGE.partition("## A map of the code")[2].partition("\n## ")[0])
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {*named} == {*folders} - {"contrib"} | {"dcl_processor"}
