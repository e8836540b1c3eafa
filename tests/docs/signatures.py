"""Write a signature as the reference shows it: plain text, with types and defaults."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

WIDTH = 80

#: Names that the code has for itself, and what stands for them on a page.
SPELLED_OUT = {
    "_Errors": "type[BaseException] | tuple[type[BaseException], ...]",
    "Opens": "Callable[[], context manager]",
    "Handler[M]": "Callable",
    "Unpack[Options]": "every other option",
    "QuerySet[M, M]": "QuerySet[M]",
    "AbstractContextManager[Any] | AbstractAsyncContextManager[Any]": "context manager",
    "Stopped": "str",
    "Subject": "BatchProcessor[Any] | str",
    "Throttle": "Callable[[], float | timedelta | bool | None]",
    "Iterator[None]": "context manager",  # as contextlib.contextmanager makes of it
    "Iterator[Stop]": "context manager that gives a threading.Event",
}

#: Arguments that are there for a type checker, or for a better error, and not for a caller.
NOT_FOR_CALLERS = {"self", "_", "misplaced", "rows: Never"}


def shown(name: str, of: Callable[..., Any]) -> str:
    """Return the signature as text, in one line or with a line for each parameter."""
    of = next(iter(typing.get_overloads(of)), of)
    signature = inspect.signature(of)
    parts, returns = _parameters(signature), type_of(signature.return_annotation)
    is_class = inspect.isclass(of) or returns == "None"
    end = ")" if is_class else f") -> {returns}"
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(_folded(f"    {part},") for part in parts), end])


def _folded(line: str) -> str:
    return line if len(line) <= WIDTH else line.replace(" | Callable", "\n        | Callable", 1)


def type_of(annotation: Any) -> str:
    """Return an annotation as a page has it."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    for name, spelled_out in SPELLED_OUT.items():
        text = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", spelled_out, text)
    return text


def value_of(default: Any) -> str:
    """Return a default as a page has it."""
    if inspect.isclass(default):
        return default.__name__
    if default is ...:
        return "None"  # what an overload leaves to the function itself
    enumeration = type(default).__module__ == "dcl_processor.definition.kinds"
    return f"{type(default).__name__}.{default.name}" if enumeration else repr(default)


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
        variable = stars.get(each.kind, "")
        if each.kind is kinds.KEYWORD_ONLY and before not in {each.kind, kinds.VAR_POSITIONAL}:
            parts.append("*")
        text = f"{variable}{name}: {type_of(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {value_of(each.default)}"
        parts.append(text)
        before = each.kind
    if before is kinds.POSITIONAL_ONLY:
        parts.append("/")
    return parts
