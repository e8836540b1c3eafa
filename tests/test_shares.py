"""A share leaves out no test and no search, and all shares together leave out nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from tests import shares
from tests.environments import CHECKOUT
from tests.shares import first, has_point, points

ALONE = ("-p", "tests.shares", "-p", "no:django", "-p", "no:hypothesispytest", "-p", "no:faker")

MODULE = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_many(number): pass

@pytest.mark.parametrize("letter", "ab")
def test_two(letter): pass

def test_one(): pass
"""

SHARES = [f"share {number}" for number in range(40)]


def collected(folder: Path, *options: str, **variables: str) -> list[str]:
    """Return the tests of the module that a run would do."""
    (folder / "test_it.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", "-q"]
    finished = subprocess.run(
        [*command, *ALONE, "--collect-only", *options, str(folder)],
        cwd=CHECKOUT,
        capture_output=True,
        env={
            **{name: value for name, value in os.environ.items() if name != "WHOLE"},
            "DATABASE_URL": "sqlite://:memory:",
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(CHECKOUT),
            **variables,
        },
        text=True,
        check=True,
        timeout=60,
    )
    return re.findall(r"::(\S+)", finished.stdout)


def test_each_test_is_in_a_share_with_one_in_so_many_sets_of_parameters(tmp_path: Path) -> None:
    names = collected(tmp_path, "--share=6", SHARE="mine")
    many = [name for name in names if name.startswith("test_many")]
    assert len(many) in {3, 4}
    assert len([name for name in names if name.startswith("test_two")]) == 1
    assert "test_one" in names
    assert names == collected(tmp_path, "--share=6", SHARE="mine")


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


class Config:
    def __init__(self, share: int, turn: str = "0/1", always: Sequence[str] = ()) -> None:
        self._options = {"--share": share, "--turn": turn, "--always": [*always]}

    def getoption(self, name: str) -> Any:
        return self._options[name]


def left(items: Sequence[Any], config: Config) -> list[Any]:
    """Return the items that are left."""
    mine = [*items]
    shares.pytest_collection_modifyitems(cast("Any", config), mine)
    return mine


def test_each_set_of_parameters_is_in_one_of_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHOLE", raising=False)
    items: list[Any] = [Item(f"test_it.py::test_many[{number}]") for number in range(20)]
    items += [Item("test_it.py::test_two[a]"), Item("test_it.py::test_two[b]")]
    found = set[Any]()
    for share in SHARES:
        monkeypatch.setenv("SHARE", share)
        mine = left(items, Config(6))
        assert len(mine) in {4, 5}
        found.update(mine)
    assert found == {*items}


def test_each_test_has_all_its_sets_in_one_turn_and_some_are_in_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WHOLE", raising=False)
    ours = [Item(f"test_it.py::test_{letter}[{n}]") for letter in "abcdefgh" for n in range(3)]
    page = [Item(f"docs/page.md::line:{line}") for line in range(5)]
    everywhere = [Item(f"test_django.py::test_many[{number}]") for number in range(12)]
    items, moved = [*ours, *page, *everywhere], set[str]()
    for share in SHARES:
        monkeypatch.setenv("SHARE", share)
        turns = [
            left(items, Config(6 if turn else 1, f"{turn}/3", always=["test_django"]))
            for turn in range(3)
        ]
        tests = [[each for each in mine if each not in everywhere] for mine in turns]
        assert sorted(each.nodeid for mine in tests for each in mine) == sorted(
            each.nodeid for each in [*ours, *page]
        )
        assert [len(set(everywhere) & {*mine}) for mine in turns] == [12, 2, 2]
        # A page's blocks need each other, and so do the sets of a test.
        assert all(len(set(page) & {*mine}) in {0, 5} for mine in turns)
        assert all(len([each for each in mine if "_a[" in each.nodeid]) in {0, 3} for mine in turns)
        moved.update(str(turn) for turn in range(3) if ours[0] in turns[turn])
    assert moved == {"0", "1", "2"}


def test_without_shares_nothing_is_left_out(tmp_path: Path) -> None:
    assert len(collected(tmp_path)) == 23
    assert len(collected(tmp_path, "--share=6", WHOLE="1")) == 23


def test_each_point_is_in_one_of_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHOLE", raising=False)
    found = set[int]()
    for share in SHARES:
        monkeypatch.setenv("SHARE", share)
        mine = [*islice(points("a search", of=4), 5)]
        assert mine == [*range(first("a search", 4), 20, 4)]
        assert mine == [number for number in range(20) if has_point(number, "a search", of=4)]
        found.update(mine)
    assert found == {*range(20)}


def test_a_whole_run_tries_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLE", "1")
    assert [*islice(points("a search", of=4), 5)] == [0, 1, 2, 3, 4]
    assert all(has_point(number, "a search", of=4) for number in range(20))


def test_two_searches_begin_at_points_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a commit would try the same points of all of them."""
    monkeypatch.setenv("SHARE", "mine")
    assert len({first(f"search {number}", 100) for number in range(20)}) > 5
