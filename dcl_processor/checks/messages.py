"""What checks say, and what they look for in a query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist
from django.db import DatabaseError
from django.db.models.expressions import Value
from django.db.models.lookups import Lookup
from django.db.models.sql import Query

from dcl_processor.exceptions import ProcessorError
from dcl_processor.processor import BatchProcessor


def error(number: str, obj: Any, sentence: str, hint: str | None = None) -> CheckMessage:
    """Return what would fail, or be wrong, in a run."""
    return checks.Error(sentence, hint=hint, obj=obj, id=f"dcl_processor.{number}")


def warning(number: str, obj: Any, sentence: str, hint: str) -> CheckMessage:
    """Return what may not be what the user intends."""
    return checks.Warning(sentence, hint=hint, obj=obj, id=f"dcl_processor.{number}")


def refusals(
    number: str, processor: BatchProcessor[Any], refuse: Callable[..., Any], *given: Any
) -> Iterator[CheckMessage]:
    """Yield the error of the check with this number if a run would refuse the processor so."""
    try:
        refuse(*given)
    except (FieldDoesNotExist, DatabaseError):
        return  # E009 reports it; or the database does not answer, which is not for a check
    except ProcessorError as refused:
        sentence = str(refused).removeprefix(f"{processor.name}: ")
        yield error(number, processor.name, sentence)


def is_frozen(value: Any) -> bool:
    """Return whether the constant looks like a time that was read from a clock at an import.

    People write no microseconds by hand, except the last one of a day.
    """
    return isinstance(value, datetime) and value.microsecond not in (0, 999_999)


def parts(node: Any) -> Iterator[Any]:
    """Yield every expression and constant in a query, a condition or an expression."""
    yield node
    children: list[Any] = [*getattr(node, "children", ())]
    if isinstance(node, Query):
        children = [node.where, *node.annotations.values()]
    elif isinstance(node, Lookup):
        children = [node.lhs, *(node.rhs if isinstance(node.rhs, list | tuple) else [node.rhs])]
    elif isinstance(node, Value):
        children = [node.value]
    elif hasattr(node, "get_source_expressions"):
        children += [getattr(node, "query", None), *node.get_source_expressions()]
    for child in children:
        yield from parts(child)
