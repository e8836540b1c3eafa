"""Checks of a definition's functions before any of them is called."""

from __future__ import annotations

import inspect
from typing import Any

from django.db.models import Model, QuerySet

from dcl_processor.options.options import Definition, takes
from dcl_processor.report.exceptions import InvalidDone, InvalidOption, InvalidPending, Unsupported
from dcl_processor.report.values import expect


def check(processor: Definition[Any]) -> None:
    """Refuse functions whose signature does not fit the way they will be called."""
    _check_pending(processor)
    _check_resource(processor)
    _check_handler(processor)
    _check_flips(processor)


def _check_pending(processor: Definition[Any]) -> None:
    source: Any = processor.pending
    if isinstance(source, QuerySet):
        return
    is_model = isinstance(source, type) and issubclass(source, Model)
    if is_model or not callable(source):
        raise InvalidPending(
            f"{processor._label}: expected pending to be a queryset or a callable that returns "
            f"one, got {source!r}; write …objects.filter(…)."
        )
    if not takes(source):
        raise InvalidPending(
            f"{processor._label}: expected pending to take no arguments, got "
            f"pending{inspect.signature(source)}; narrow a run with filter=Q(…) instead."
        )


def _check_resource(processor: Definition[Any]) -> None:
    resource: Any = processor.resource
    fits = callable(resource) and takes(resource)
    words = "a callable without arguments that returns a context manager"
    expect(fits, f"{processor._label}: expected resource", words, resource)


def _check_handler(processor: Definition[Any]) -> None:
    name, what = ("process_batch", "rows") if processor._handles_batches else ("process", "one row")
    handler: Any = getattr(processor, name)
    called = getattr(handler, "__name__", name)
    named = f"{processor._label}: expected {name}"
    expect(callable(handler), named, f"a function of {what}", handler)
    _check_kind(processor, handler, called)
    is_own = getattr(processor.resource, "__qualname__", "") != "Definition.resource"
    resource = ["resource"] if is_own else []
    if not takes(handler, "row or rows", *resource):
        raise InvalidOption(
            f"{processor._label}: expected the handler to take {what}"
            f"{' and the resource' if resource else ''}, got {called}{inspect.signature(handler)}."
        )


def _check_kind(processor: Definition[Any], handler: Any, called: str) -> None:
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise InvalidOption(
            f"{processor._label}: expected a function that does the work when it is called, got "
            f"the generator {called}(); remove the 'yield'."
        )
    if not inspect.iscoroutinefunction(handler):
        return
    if processor._handles_batches:
        raise Unsupported(
            f"{processor._label}: expected a plain function, got 'async def {called}'; write "
            "'def', or an async process() with concurrency=…."
        )
    if processor.is_transactional:
        raise Unsupported(
            f"{processor._label}: expected a plain function, got 'async def {called}': a row's "
            "lock cannot be held across an event loop; write 'def', or choose "
            "Delivery.AT_LEAST_ONCE or AT_MOST_ONCE, whose handlers run outside the transaction."
        )


def _check_flips(processor: Definition[Any]) -> None:
    for option, words in (
        ("done", "(row, result), or (row) where the result does not matter"),
        ("failed", "(row, error)"),
    ):
        get: Any = getattr(processor, f"get_{option}")
        fits = takes(get, None, None) or (option == "done" and takes(get, None))
        if not callable(get) or not fits:
            raise InvalidDone(
                f"{processor._label}: expected {option} as a callable to take {words}, got {get!r}."
            )
