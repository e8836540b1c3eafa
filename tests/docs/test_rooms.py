"""Each folder of the package imports only from those before it in CONTRIBUTING's map."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "dcl_processor"
MAP = (
    (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A map of the code")[2]
)
ROOMS = [
    room
    for line in re.findall(r"^- (`.*?): ", MAP.partition("\n## ")[0], re.MULTILINE)
    for room in re.findall(r"`(\w+)/`", line)
]
#: The stages of a row; the rooms behind them are users of the package.
STAGES = ROOMS[: ROOMS.index("engine") + 1]


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, those for types alone left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    folder = ["dcl_processor", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            above = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.startswith("dcl_processor"):
                names = [each.name for each in node.names]
                yield from (f"{module}.{name}" for name in names)


def room_of(module: str) -> str:
    """Return the folder, or the module at the top, that a dotted name is in.

    Each part of ``contrib`` is a room of its own: the processor imports one when it is used.
    """
    _, *parts = [*module.split("."), "", ""]
    return ".".join(parts[:2]) if parts[0] == "contrib" else parts[0]


def arrows() -> dict[str, set[str]]:
    """Return from which other rooms each room imports."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "core" in path.parents:
            continue  # it is used by nothing yet, and tests/test_shape.py holds it
        room = room_of(dotted(path))
        others = {room_of(module) for module in imported(path)} - {room, ""}
        found.setdefault(room, set()).update(others)
    return found


def dotted(path: Path) -> str:
    return ".".join(["dcl_processor", *path.relative_to(PACKAGE).with_suffix("").parts])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_from_those_before_it(stage: str) -> None:
    later = ROOMS[ROOMS.index(stage) + 1 :]
    others = {each.partition(".")[0] for each in arrows()[stage]}
    assert not others & {*later, "contrib", "processor", "decorator"}


def test_no_two_rooms_import_from_each_other() -> None:
    """Not through others either."""
    left = arrows()
    del left["__init__"]  # the front door, which all may look at
    for others in left.values():
        others.discard("__init__")
    TopologicalSorter(left).prepare()


def test_no_two_modules_import_from_each_other() -> None:
    """Nor inside a folder."""
    files = {dotted(path): path for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    left = {
        module: {name if name in files else name.rpartition(".")[0] for name in imported(path)}
        for module, path in files.items()
    }
    assert left["dcl_processor.definition.validation"] >= {"dcl_processor.definition.kinds"}
    TopologicalSorter(left).prepare()
