"""What a loop by hand costs, and what is left of it as a processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ported.lines import lines

HERE = Path(__file__).parent

#: Lines of code: as a processor, and by hand.
LINES: dict[str, tuple[int, int]] = {
    "broadcasts": (8, 19),
    "changes": (17, 37),
    "tasks": (11, 43),
    "prices": (13, 39),
    "jobs": (16, 50),
}


@pytest.mark.parametrize("name", LINES)
def test_the_processor_is_shorter(name: str) -> None:
    processor, by_hand = lines("as_processor", name), lines("by_hand", name)
    assert (processor, by_hand) == LINES[name]
    assert processor < by_hand


def test_every_loop_is_counted() -> None:
    for way in ("as_processor", "by_hand"):
        modules = {path.stem for path in (HERE / way).glob("*.py")} - {"__init__"}
        assert modules == {*LINES}
