"""The resource that a handler needs: opened late, kept open, and reopened after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from dcl_processor.options.options import Definition
from dcl_processor.report.errors import forget_frames, raise_interrupt
from dcl_processor.report.exceptions import InvalidOption
from dcl_processor.report.log import log


class Resource:
    """The processor's ``resource()`` in one thread.

    ``arguments``: the handler's arguments after its row: the resource, or nothing. ``failure``: why
    it could not be opened; no row is to blame for that. ``is_stale``: a row has failed with it,
    and the next ``ready()`` reopens it. ``run``: runs a coroutine on the loop of all handlers.
    """

    def __init__(self, processor: Definition[Any], run: Callable[[Any], Any] | None = None) -> None:
        self._processor, self._run = processor, run
        self._stack: ExitStack | None = None
        self.is_stale = False
        self.arguments: tuple[Any, ...] = ()
        self.failure: BaseException | None = None

    def ready(self) -> bool:
        """Open it unless it is open and works; return whether a handler may be called."""
        if self.is_stale:
            self.close()
        if self._stack is None and self.failure is None:
            stack = ExitStack()
            try:
                self.arguments = self._open(stack)
                self._stack = stack
            except InvalidOption:
                raise
            except BaseException as error:  # noqa: BLE001  # of the user's code
                raise_interrupt(error)
                self._log("opened", error)
                forget_frames(error)
                self.failure = error
        return self.failure is None

    def close(self) -> None:
        """Close it; an error is logged, because the rows are done."""
        stack, self._stack, self.arguments, self.is_stale = self._stack, None, (), False
        if stack is None:
            return
        try:
            stack.close()
        except BaseException as error:  # noqa: BLE001  # as above
            raise_interrupt(error)
            self._log("closed", error)

    def _log(self, what: str, error: BaseException) -> None:
        words, name = "%s: the resource could not be %s: %s", self._processor.name
        log(logging.ERROR, words, name, what, error, error=error)

    def _open(self, stack: ExitStack) -> tuple[Any, ...]:
        manager: Any = self._processor.resource()
        if manager is None:
            return ()
        run = self._run
        if run is not None and hasattr(manager, "__aenter__"):
            opened = run(manager.__aenter__())
            stack.callback(lambda: run(manager.__aexit__(None, None, None)))
            return (opened,)
        if not hasattr(manager, "__enter__"):
            # Inside a TestCase each call of a handler has an event loop of its own.
            got = "one for 'async with'" if hasattr(manager, "__aenter__") else repr(manager)
            raise InvalidOption(
                f"{self._processor.name}: expected resource() to return a context manager, got "
                f"{got}; wrap it with contextlib's contextmanager or closing(), and use one for "
                "'async with' with asynchronous handlers alone, not inside a TestCase."
            )
        return (stack.enter_context(manager),)
