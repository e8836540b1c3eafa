"""Weighs a package: lines, modules, decisions, circles of imports, and what each module imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True)
class Module:
    """A module: its dotted name, its text, and its tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def decisions(self) -> int:
        return sum(_decisions(node) for node in ast.walk(self.tree))

    def functions(self) -> Iterator[tuple[str, int]]:
        """Yield each function with the number of its lines."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{self.name}:{node.name}", (node.end_lineno or 0) - node.lineno + 1

    def names(self, *, in_functions: bool = True) -> Iterator[str]:
        """Yield the dotted names that it imports anywhere, for type checkers too."""
        for node in ast.walk(self.tree) if in_functions else _outside_functions(self.tree):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.name.split(".")[: -node.level] if node.level else []
                stem = ".".join([*base, *filter(None, [node.module])])
                yield stem
                yield from (f"{stem}.{each.name}" for each in node.names)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for each in ast.iter_child_nodes(node):
            yield from _outside_functions(each)


def _decisions(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return len(node.ifs)
    return int(isinstance(node, _BRANCHES))


@dataclass(frozen=True)
class Package:
    """The modules of a folder by their dotted names; migrations are generated, and left out."""

    modules: dict[str, Module]

    @classmethod
    def read(cls, folder: Path) -> Package:
        """Read a package that lies in the checkout."""
        found = {}
        top = next(each for each in folder.parents if not (each / "__init__.py").exists())
        for path in sorted(folder.rglob("*.py")):
            if "migrations" in path.relative_to(folder).parts:
                continue
            parts = [*path.relative_to(top).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text("utf-8")
            found[name] = Module(name, text, ast.parse(text))
        return cls(found)

    @property
    def lines(self) -> int:
        return sum(each.lines for each in self.modules.values())

    @property
    def decisions(self) -> int:
        return sum(each.decisions for each in self.modules.values())

    def imports(self) -> dict[str, set[str]]:
        """Return which of its own modules each of its modules imports."""
        return {
            name: {each for each in module.names() if each in self.modules} - {name}
            for name, module in self.modules.items()
        }

    def circle(self) -> list[str]:
        """Return the modules of a circle of imports, or an empty list.

        What the whole package's ``__init__`` takes from its modules is for users.
        """
        graph = {
            name: {each for each in found if "." in each} for name, found in self.imports().items()
        }
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            return [*error.args[1]]
        return []
