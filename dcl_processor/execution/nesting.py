"""Keeps a handler from running its own processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import Unsupported

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: The processors in whose runs this code runs; the threads of a run have its context.
running: ContextVar[tuple[object, ...]] = ContextVar("dcl_processor_running", default=())


@contextmanager
def entered(processor: Definition[Any]) -> Iterator[None]:
    """Record that the processor runs; raise ``Unsupported`` if it already does."""
    outer = running.get()
    if any(each is processor._identity for each in outer):
        raise Unsupported(
            f"{processor.name}: expected the handler not to run its own processor, got a run "
            "inside a run, which would nest once more for every row; remove the call, because the "
            "current run takes the other rows."
        )
    token = running.set((*outer, processor._identity))
    try:
        yield
    finally:
        running.reset(token)
