"""A share leaves out no test and no search, and all shares together leave out nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import pytest

from tests import shares
from tests.shares import first, has_point, points

SHARES = [f"share {number}" for number in range(40)]


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


class Config:
    def __init__(self, share: int, *whole: str) -> None:
        self._options = {"--share": share, "--whole": [*whole]}

    def getoption(self, name: str) -> Any:
        return self._options[name]


def left(items: Sequence[Any], config: Config) -> list[Any]:
    """Return the items that are left."""
    mine = [*items]
    shares.pytest_collection_modifyitems(cast("Any", config), mine)
    return mine


ITEMS: list[Any] = [
    *(Item(f"test_it.py::test_many[{number}]") for number in range(20)),
    *(Item(f"test_it.py::test_two[{letter}]") for letter in "ab"),
    Item("test_it.py::test_one"),
    *(Item(f"docs/page.md::line:{line}") for line in range(5)),
]


def test_each_share_has_as_many_sets_of_each_test_and_together_they_have_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WHOLE", raising=False)
    found = set[Any]()
    for share in SHARES:
        monkeypatch.setenv("SHARE", share)
        mine = left(ITEMS, Config(6))
        names = Counter(each.nodeid.partition("[")[0] for each in mine)
        assert names["test_it.py::test_many"] == 4
        assert names["test_it.py::test_two"] == names["test_it.py::test_one"] == 1
        assert len([name for name in names if name.startswith("docs/")]) == 5
        assert mine == left(ITEMS, Config(6))
        found.update(mine)
    assert found == {*ITEMS}


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
