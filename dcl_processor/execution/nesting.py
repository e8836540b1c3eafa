"""Keeps a handler from what only code outside its processor's run may do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from dcl_processor.definition.kinds import rules_of
from dcl_processor.exceptions import InvalidOption, Unsupported

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: The processors in whose runs this code runs; the threads of a run have its context.
entered_now: ContextVar[tuple[object, ...]] = ContextVar("dcl_processor_running", default=())


@contextmanager
def entered(processor: Definition[Any]) -> Iterator[None]:
    """Record that the processor runs; raise ``Unsupported`` if it already does."""
    outer = entered_now.get()
    if not hasattr(processor, "_identity"):
        raise InvalidOption(
            f"expected {type(processor).__name__}.__init__() to call super().__init__(), which "
            "checks the options, got a processor without them."
        )
    if _runs(processor):
        raise Unsupported(
            f"{processor.name}: expected the handler not to run its own processor, got a run "
            "inside a run, which would nest once more for every row; remove the call, because the "
            "current run takes the other rows."
        )
    token = entered_now.set((*outer, processor._identity))
    try:
        yield
    finally:
        entered_now.reset(token)


def refuse_key_with_others(processor: Definition[Any]) -> None:
    """Raise ``Unsupported`` where ``lock_key()`` would wait for another handler of the processor.

    With several rows of a key in flight in one transaction each, a key has as many locks. A handler
    has one of them until its transaction ends, and two handlers would wait for each other's.
    """
    most = processor.max_per_group or 1
    if most > 1 and rules_of(processor).in_transaction and _runs(processor):
        raise Unsupported(
            f"{processor.name}: expected lock_key() outside the handlers of a processor with "
            f"{str(processor.delivery).upper()} and max_per_group={most}, where two handlers of "
            "one key would wait for each other, got a call in one of them; leave max_per_group "
            "out, choose AT_LEAST_ONCE, or insert the rows after the run."
        )


def _runs(processor: Definition[Any]) -> bool:
    """Return whether this code runs in a run of the processor."""
    return any(each is processor._identity for each in entered_now.get())
