"""Which rows one flip statement can write."""

from __future__ import annotations

from dcl_processor.settlement.grouping import group


class Alike:
    """A value of the user's that looks like any other of its kind."""

    def __repr__(self) -> str:
        return "Alike()"


def test_values_that_only_look_the_same_are_written_apart() -> None:
    one, other = Alike(), Alike()
    flips = {1: {"note": one}, 2: {"note": other}, 3: {"note": one}}
    assert group(flips) == [({"note": one}, [1, 3]), ({"note": other}, [2])]


def test_values_that_only_compare_equal_are_written_apart() -> None:
    assert [pks for _, pks in group({1: {"n": 1}, 2: {"n": True}, 3: {"n": 1}})] == [[1, 3], [2]]
