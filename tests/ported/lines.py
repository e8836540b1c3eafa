"""Counts the lines that someone has to write, and to read."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent


def lines(way: str, name: str) -> int:
    """Return the lines of code of a module: those of imports, comments and gaps left out."""
    source = (HERE / way / f"{name}.py").read_text(encoding="utf-8")
    imports = {
        number
        for node in ast.parse(source).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        number not in imports and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(source.splitlines(), 1)
    )
