"""Cuts out of the front, of tests and of the shop what uses a deleted part."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

_Import = ast.Import | ast.ImportFrom
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_gone(name: str, gone: Collection[str]) -> bool:
    """Return whether the dotted name, or a module that it lies in, is gone."""
    parts = name.split(".")
    return any(".".join(parts[:at]) in gone for at in range(1, len(parts) + 1))


@dataclass
class Statement:
    """What can be cut out alone: a statement of a module, of a class, or under a condition.

    ``parts``: the statements in it. ``uses``: local names; ``of_modules``: names with a dot;
    ``imports``: the dotted names that it imports while it runs.
    """

    node: ast.stmt
    text: str
    parts: list[Statement]
    uses: set[str] = field(default_factory=set)
    of_modules: set[tuple[str, str]] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    is_cut: bool = False

    def flat(self) -> Iterator[Statement]:
        for each in self.parts:
            yield from each.flat()
        yield self

    @property
    def is_test(self) -> bool:
        return isinstance(self.node, _Function) and self.node.name.startswith("test_")

    @property
    def span(self) -> tuple[int, int]:
        return span(self.node)

    def defines(self) -> Iterator[str]:
        if isinstance(self.node, _Function | ast.ClassDef):
            yield self.node.name
        for each in ast.iter_child_nodes(self.node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id


def span(node: ast.stmt) -> tuple[int, int]:
    """Return the first and the last line of a statement, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)]), node.end_lineno or node.lineno


class File:
    """A module of the copy; ``bad``: its names that lead to something that is gone."""

    def __init__(self, path: Path, folder: Path) -> None:
        parts = path.relative_to(folder).with_suffix("").parts
        self.path, self.name = path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.package = self.name if path.stem == "__init__" else self.name.rpartition(".")[0]
        self.text = path.read_text("utf-8")
        self.lines, self.tree = self.text.splitlines(keepends=True), ast.parse(self.text)
        self.bad: set[str] = set()
        classes = [each for each in ast.walk(self.tree) if isinstance(each, ast.ClassDef)]
        self.attributes = {getattr(each, "name", "") for one in classes for each in one.body}
        self.top = [self._statement(each) for each in self.tree.body]
        self.all = [each for one in self.top for each in one.flat()]
        outside = (each for each in self.tree.body if not isinstance(each, _Function))
        self.known = {alias.asname or alias.name: name for alias, name in self.imported(*outside)}

    def imported(self, *nodes: ast.AST) -> Iterator[tuple[ast.alias, str]]:
        """Yield each name that is imported there, with the dotted name that it stands for."""
        for node in (each for outer in nodes for each in ast.walk(outer)):
            if isinstance(node, ast.Import):
                yield from ((alias, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.package.split(".")[: 1 - node.level or None] if node.level else []
                stem = ".".join([*base, *filter(None, [node.module])])
                yield from ((alias, f"{stem}.{alias.name}") for alias in node.names)

    def _statement(self, node: ast.stmt) -> Statement:
        first, last = span(node)
        made = Statement(node, "".join(self.lines[first - 1 : last]), [])
        looked: list[ast.AST] = [node]
        if isinstance(node, ast.ClassDef | ast.If):
            inner = node.body if isinstance(node, ast.ClassDef) else [*node.body, *node.orelse]
            made.parts, made.text = [self._statement(each) for each in inner], ""
            looked = [*getattr(node, "bases", []), *getattr(node, "decorator_list", [])]
        if isinstance(node, _Import):
            return made  # it is looked at name by name
        made.imports = {name for _, name in self.imported(*looked)}
        for each in (inner for outer in looked for inner in ast.walk(outer)):
            match each:
                case ast.Name(id=name) | ast.arg(arg=name):
                    made.uses.add(name)
                case ast.Attribute(value=ast.Name(id=name), attr=attr):
                    made.of_modules.add((name, attr))
        return made

    def look(self, gone: set[str], words: re.Pattern[str]) -> bool:
        """Cut out what uses a gone name; return whether there is anything."""
        self.bad |= {name for name, dotted in self.known.items() if is_gone(dotted, gone)}
        found = [
            each for each in self.all if not each.is_cut and self._has_to_go(each, gone, words)
        ]
        for each in found:
            each.is_cut = True
            names = {*each.defines()} - self.attributes
            self.bad |= names
            gone |= {f"{self.name}.{name}" for name in names}
        return bool(found)

    def _has_to_go(self, it: Statement, gone: set[str], words: re.Pattern[str]) -> bool:
        return (
            bool(it.uses & self.bad)
            or any(is_gone(name, gone) for name in it.imports)
            or any(is_gone(f"{self.known.get(name)}.{attr}", gone) for name, attr in it.of_modules)
            or bool(words.search(it.text))
            or (bool(it.parts) and all(each.is_cut for each in it.parts))
        )

    def write(self, gone: Collection[str]) -> None:
        """Write the text without what is cut out, and without the imports of what is gone."""
        put = {each.span: "" for each in self.all if each.is_cut}
        for node in ast.walk(self.tree):
            if isinstance(node, _Import):
                names = [alias for alias, name in self.imported(node) if not is_gone(name, gone)]
                if len(names) < len(node.names):
                    node.names = names
                    text = ast.unparse(node) if names else "pass"
                    put.setdefault(span(node), " " * node.col_offset + text + "\n")
        # Inner spans last: they are gone if the outer one is.
        for (first, last), text in sorted(put.items(), key=lambda each: each[0][1] - each[0][0]):
            self.lines[first - 1 : last] = [text, *[""] * (last - first)]
        self.path.write_text("".join(self.lines), "utf-8")


def cut(files: list[File], gone: set[str], words: Collection[str]) -> int:
    """Cut out what uses a gone name, and what uses that, until nothing does; count the tests."""
    pattern = re.compile("|".join(words) or r"(?!)")
    while any(each.look(gone, pattern) for each in files):
        pass
    for each in files:
        if each.bad or any(one.is_cut for one in each.all):
            each.write(gone)
    return sum(one.is_cut and one.is_test for each in files for one in each.all)
