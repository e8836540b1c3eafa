"""What checks say, and what they recognise: a time that was read from the clock at an import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage
from django.core.exceptions import FieldDoesNotExist
from django.db import DatabaseError
from django.db.models.expressions import Value
from django.db.models.lookups import Lookup
from django.db.models.sql import Query
from django.utils import timezone

from dcl_processor.exceptions import ProcessorError
from dcl_processor.processor import BatchProcessor

# Modules are imported after this one, or a moment before it.
_STARTED = datetime.now(UTC)
_MARGIN = timedelta(seconds=10)


def error(number: str, obj: Any, sentence: str, hint: str | None = None) -> CheckMessage:
    """Return what would fail, or be wrong, in a run."""
    return checks.Error(sentence, hint=hint, obj=obj, id=f"dcl_processor.{number}")


def warning(number: str, obj: Any, sentence: str, hint: str) -> CheckMessage:
    """Return what may not be what the user intends."""
    return checks.Warning(sentence, hint=hint, obj=obj, id=f"dcl_processor.{number}")


def refusals(
    number: str, processor: BatchProcessor[Any], hint: str, refuse: Callable[..., Any], *given: Any
) -> Iterator[CheckMessage]:
    """Yield the error of the check with this number if a run would refuse the processor so."""
    try:
        refuse(*given)
    except (FieldDoesNotExist, DatabaseError):
        return  # E009 reports it; or the database does not answer, which is not for a check
    except ProcessorError as refused:
        sentence = str(refused).removeprefix(f"{processor.name}: ")
        yield error(number, processor.name, sentence, hint)


def is_frozen(value: Any) -> bool:
    """Return whether the constant looks as if it was read from a clock at this process's start.

    People do not write microseconds by hand, except the last one of a day. So microseconds show
    ``now() - timedelta(days=30)`` too.
    """
    if isinstance(value, datetime):
        aware = value if timezone.is_aware(value) else timezone.make_aware(value)
        recent = _STARTED - _MARGIN <= aware <= datetime.now(UTC) + _MARGIN
        return recent or value.microsecond not in (0, 999_999)
    today = datetime.now(UTC).date(), datetime.now().astimezone().date()
    return isinstance(value, date) and value in today


def parts(node: Any) -> Iterator[Any]:
    """Yield every expression and constant in a query, a condition or an expression."""
    yield node
    children: list[Any] = [*getattr(node, "children", ())]
    if isinstance(node, Query):
        children = [node.where, *node.annotations.values()]
    elif isinstance(node, Lookup):
        several = isinstance(node.rhs, list | tuple | set | frozenset)
        children = [node.lhs, *(node.rhs if several else [node.rhs])]
    elif isinstance(node, Value):
        children = [node.value]
    elif hasattr(node, "get_source_expressions"):
        children += [getattr(node, "query", None), *node.get_source_expressions()]
    for child in children:
        yield from () if child is None else parts(child)
