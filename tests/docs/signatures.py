"""Write a signature as the reference shows it: names and defaults, in one line."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

#: The columns of code that a page shows without a scroll bar.
WIDTH = 80

#: Arguments that are there for a type checker, or for a better error, and not for a caller.
NOT_FOR_CALLERS = {"self", "_", "misplaced", "rows: Never"}


def shown(name: str, of: Callable[..., Any]) -> str:
    """Return the signature as text."""
    of = next(iter(typing.get_overloads(of)), of)
    return f"{name}({', '.join(_parameters(_signature(of)))})"


def value_of(default: Any) -> str:
    """Return a default as a page has it."""
    if inspect.isclass(default):
        return default.__name__
    if default is ...:
        return "None"  # what an overload leaves to the function itself
    enumeration = type(default).__module__ == "dcl_processor.options.kinds"
    return f"{type(default).__name__}.{default.name}" if enumeration else repr(default)


def parameters(of: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that a caller may give."""
    return [name for name in _signature(of).parameters if name not in NOT_FOR_CALLERS]


def _signature(of: Callable[..., Any]) -> inspect.Signature:
    # A class may have a __new__() that refuses old names, and takes anything.
    return inspect.signature(vars(of)["__init__"] if inspect.isclass(of) else of)


def _parameters(signature: inspect.Signature) -> list[str]:
    parts: list[str] = []
    kinds = inspect.Parameter
    stars: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    before: Any = None
    for name, each in signature.parameters.items():
        if name in NOT_FOR_CALLERS or f"{name}: {each.annotation}" in NOT_FOR_CALLERS:
            continue
        if before is kinds.POSITIONAL_ONLY and each.kind is not kinds.POSITIONAL_ONLY:
            parts.append("/")
        if each.kind is kinds.KEYWORD_ONLY and before not in {each.kind, kinds.VAR_POSITIONAL}:
            parts.append("*")
        default = "" if each.default is each.empty else f"={value_of(each.default)}"
        parts.append(f"{stars.get(each.kind, '')}{name}{default}")
        before = each.kind
    if before is kinds.POSITIONAL_ONLY:
        parts.append("/")
    return parts
