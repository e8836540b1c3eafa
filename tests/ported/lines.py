"""Counts the lines that someone has to write, and to read."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

HERE = Path(__file__).parent


def lines(way: str, name: str) -> int:
    """Return the lines of code of a module."""
    return code_lines((HERE / way / f"{name}.py").read_text(encoding="utf-8"))


def lines_of(*functions: Callable[..., Any]) -> int:
    """Return the lines of code of functions, as they are installed."""
    return sum(code_lines(dedent(inspect.getsource(each))) for each in functions)


def code_lines(source: str) -> int:
    """Return the lines of code: those of imports, comments, docstrings and gaps left out."""
    left_out = {
        number
        for node in _left_out(ast.parse(source))
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        number not in left_out and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(source.splitlines(), 1)
    )


def _left_out(module: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node  # a docstring
