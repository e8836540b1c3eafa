"""A shape of a loop, its processor, and the lines of that."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from django.utils import timezone

from tests.ported.models import Account, Item, Part

HERE = Path(__file__).parent

#: The rows of a shape that names none: by name, the columns that are not as usual.
USUAL: Mapping[str, Mapping[str, Any]] = {"a": {}, "b": {}, "bad": {}}
USUAL_END = {"a": "done", "b": "done", "bad": "new"}


@dataclass(frozen=True)
class Shape:
    """What a loop does, as the page says it, and what becomes of the rows.

    ``shows``: the attributes of a row that ``end`` has by the row's name. ``calls``: the calls that
    succeed, in any order unless ``ordered``. ``rounds``: how often the loop runs, with all waiting
    rows made due before each. ``workers``: how many workers run the processor together.
    """

    name: str
    loop: str
    _: KW_ONLY
    family: str = ""
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: USUAL)
    shows: str = "state"
    end: Mapping[str, str] = field(default_factory=lambda: USUAL_END)
    calls: Sequence[str] = ("a", "b")
    ordered: bool = False
    rounds: int = 1
    workers: int = 2
    buried: Sequence[str] = ()

    def __str__(self) -> str:
        return self.name

    def make_rows(self) -> None:
        accounts: dict[str, Account] = {}
        items: dict[str, Item] = {}
        for name, given in self.rows.items():
            values = {column: _at(value) for column, value in given.items()}
            key = values.get("owner", "")
            if key not in accounts:
                accounts[key] = Account.objects.create(closed=key == "closed")
            values["owner"] = accounts[key]
            if "parent" in values:
                values["parent"] = items[values["parent"]]
            items[name] = Item.objects.create(name=name, **values)

    def found(self) -> dict[str, str]:
        """Return what the rows show now, by their names."""
        names = self.shows.split()
        items = Item.objects.select_related("owner")
        return {
            item.name: " ".join(str(getattr(item, name)) for name in names).strip()
            for item in items
        }

    def found_buried(self) -> list[str]:
        return sorted(Part.objects.filter(item=None).values_list("text", flat=True))

    def processor(self) -> Callable[[], Any]:
        module = import_module(f"tests.ported.shapes.{self.family}")
        processor: Callable[[], Any] = getattr(module, self.name)
        return processor

    def source(self) -> list[str]:
        """Return its lines of code: its helpers are those that stand before it."""
        return _blocks(self.family)[self.name]


def _at(value: Any) -> Any:
    """Return the time so long from now, if the value is a duration."""
    return timezone.now() + value if isinstance(value, timedelta) else value


def names_of(family: str) -> list[str]:
    return [*_blocks(family)]


def _blocks(family: str) -> dict[str, list[str]]:
    """Return the lines of each shape of a module, without gaps: a shape ends with its name."""
    from tests.ported.shapes.table import SHAPES

    names = {shape.name for shape in SHAPES}
    source = (HERE / f"{family}.py").read_text(encoding="utf-8")
    lines, blocks, block = source.splitlines(), dict[str, list[str]](), list[str]()
    for first, last, name in _statements(source):
        if name == "logger" or name.isupper():
            continue
        block += [line for line in lines[first - 1 : last] if line.strip()]
        if name in names:
            blocks[name], block = block, []
    assert not block, f"expected {family}.py to end with a shape, got {block}"
    return blocks


def _statements(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the lines and the name of each statement that defines one."""
    for node in ast.parse(source).body:
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield first, last, node.name
        elif isinstance(node, ast.Assign):
            yield node.lineno, last, ast.unparse(node.targets[0])
