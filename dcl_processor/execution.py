"""Stage 3: the handler, and the outcome of one row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import connections

from .contention import ends_transaction
from .exceptions import Unsupported

if TYPE_CHECKING:
    from .definition import BatchProcessor


@dataclass(frozen=True, slots=True)
class Handled:
    """The handler returned; ``result`` is what it returned."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The row failed and is as it was before.

    ``handled``: the handler did its work, and it was the flip or the commit that failed.
    """

    error: Exception
    handled: bool = False


def execute(processor: BatchProcessor[Any], row: Any, using: str) -> Handled | Failed:
    """Call the handler in the row's transaction; an exception becomes an outcome here.

    ``KeyboardInterrupt`` and ``SystemExit`` are nobody's failure and go through.
    """
    watch = _Watch()
    try:
        with connections[using].execute_wrapper(watch):
            result = processor.process(row)
        _refuse_coroutine(processor, result)
    except Exception as error:  # noqa: BLE001  # whatever a handler raises is its row's failure
        return Failed(error)
    # A handler may have swallowed the error that cost the transaction, and with it the lock and
    # the work; a flip would now be alone in a new transaction.
    return Failed(watch.fatal, handled=True) if watch.fatal else Handled(result)


class _Watch:
    """Sees the handler's statements fail, even when the handler does not tell."""

    fatal: Exception | None = None

    def __call__(self, execute: Callable[..., Any], *args: Any) -> Any:
        try:
            return execute(*args)
        except Exception as error:
            if ends_transaction(error):
                self.fatal = error
            raise


def _refuse_coroutine(processor: BatchProcessor[Any], result: Any) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise Unsupported(
            f"{processor.name}: expected the handler to do its work and return, got a coroutine "
            "that nobody awaits; write 'def', and call async code with async_to_sync()."
        )
