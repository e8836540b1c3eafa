"""The decorator for functions: ``@batch_processor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from django.db.models import Model, QuerySet

from dcl_processor.processor import BatchProcessor
from dcl_processor.report.exceptions import InvalidOption

M = TypeVar("M", bound=Model)


def batch_processor(
    *misplaced: Any,
    pending: QuerySet[M] | Callable[[], QuerySet[M]] | None = None,
    done: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
    failed: Mapping[str, Any] | Callable[[M, Exception], Mapping[str, Any] | None] | None = None,
    resource: Callable[[], Any] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], BatchProcessor[M]]:
    """Turn a function of one row into a processor; the function's name becomes the processor's.

    ``pending``: a queryset, or a callable that returns one. ``done``: the flip as a mapping, or a
    callable of ``(row, result)`` or ``(row)``; ``None``: the function itself takes the row out.

    Calling the processor runs it; its ``process(row)`` is the plain function, for a unit test.
    """
    if misplaced:
        raise InvalidOption(
            "expected @batch_processor(pending=…, done=…) with keyword arguments only, got "
            f"{misplaced[0]!r}; give each option by its name."
        )
    given: dict[str, Any] = {
        "get_done" if callable(done) else "done": done,
        "get_failed" if callable(failed) else "failed": failed,
        "resource": resource,
    }
    given |= options
    given = {name: value for name, value in given.items() if value is not None or name in options}

    def decorate(function: Callable[..., Any]) -> BatchProcessor[M]:
        identity = _identity(function)
        processor: BatchProcessor[M]
        processor = BatchProcessor(pending=pending, process=function, **given)
        vars(processor).update(identity)
        return processor

    return decorate


def _identity(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the attributes that the processor takes over from its handler."""
    if not hasattr(function, "__name__") or getattr(function, "__module__", None) is None:
        raise InvalidOption(
            "expected the handler to be a function, which gives the processor its name, got "
            f"{function!r}; pass it to BatchProcessor(process=…, pending=…, name=…) instead."
        )
    names = ("__module__", "__name__", "__qualname__", "__doc__")
    return {name: getattr(function, name) for name in names}
