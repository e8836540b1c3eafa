"""The resource that a handler needs: opened late, kept open, and reopened after a failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcl_processor.errors import forget_frames
from dcl_processor.exceptions import InvalidOption
from dcl_processor.interrupts import ends_the_run
from dcl_processor.log_fields import log

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

    from .event_loop import EventLoop


logger = logging.getLogger("dcl_processor")


class OpenFailure:
    """The error with which a resource could not be opened, shared by all threads of a run."""

    error: BaseException | None = None


@dataclass
class OpenResource:
    """An opened resource; ``users``: the number of batches whose handlers use it."""

    stack: ExitStack
    arguments: tuple[Any, ...]
    users: int = 0


class Resource:
    """The processor's ``resource()`` in one lane; an event loop's handlers share it.

    ``failure``: gets the error, if it cannot be opened. No row is to blame for that, so no attempt
    is counted. ``arguments``: the handler's arguments after its row: the resource, or nothing.
    """

    def __init__(
        self, processor: Definition[Any], event_loop: EventLoop | None, failure: OpenFailure
    ) -> None:
        self._processor = processor
        self._event_loop = event_loop
        self._opened: OpenResource | None = None
        self._failure = failure
        self.arguments: tuple[Any, ...] = ()
        #: Whether ``ready()`` has nothing to open or close.
        self.is_open = False

    def ready(self) -> bool:
        """Open it unless it is open and works; return whether a handler may be called."""
        if not self.is_open:
            self.close()
        if self._opened is None and self._failure.error is None:
            stack = ExitStack()
            try:
                arguments = self._open(stack)
            except InvalidOption:
                raise
            except BaseException as error:
                if ends_the_run(error):
                    raise
                # No row is to blame.
                self._log("opened", error)
                forget_frames(error)
                self._failure.error = error
            else:
                self._opened, self.arguments = OpenResource(stack, arguments), arguments
                self.is_open = True
        return self._failure.error is None

    def reopen_later(self, opened: OpenResource | None = None) -> None:
        """Note that a row failed: the next ``ready()`` reopens it, unless that was another one."""
        if opened in (None, self._opened):
            self.is_open = False

    @contextmanager
    def borrowed(self) -> Iterator[OpenResource]:
        """Lend it to a batch; if it must be reopened meanwhile, its last user closes it."""
        opened = self._opened or OpenResource(ExitStack(), ())
        opened.users += 1
        try:
            yield opened
        finally:
            opened.users -= 1
            if opened is not self._opened and not opened.users:
                self._close(opened)

    def close(self) -> None:
        """Close it, unless a batch uses it. An error is logged: the rows are done."""
        opened, self._opened, self.arguments = self._opened, None, ()
        self.is_open = False
        if opened is not None and not opened.users:
            self._close(opened)

    def _close(self, opened: OpenResource) -> None:
        try:
            opened.stack.close()
        except BaseException as error:
            if ends_the_run(error):
                raise
            self._log("closed", error)  # and no more: the rows are done

    def _log(self, what: str, error: BaseException) -> None:
        words, name = "%s: the resource could not be %s: %s", self._processor.name
        log(logger, logging.ERROR, words, name, what, error, extra={}, exc_info=error)

    def _open(self, stack: ExitStack) -> tuple[Any, ...]:
        manager: Any = self._processor.resource()
        if manager is None:
            return ()
        if self._event_loop is not None and hasattr(manager, "__aenter__"):
            call = self._event_loop.call
            opened = call(manager.__aenter__())
            stack.callback(lambda: call(manager.__aexit__(None, None, None)))
            return (opened,)
        if not hasattr(manager, "__enter__"):
            asynchronous = hasattr(manager, "__aenter__")
            got = "one for 'async with' and a plain handler" if asynchronous else repr(manager)
            raise InvalidOption(
                f"{self._processor.name}: expected resource() to return a context manager, got "
                f"{got}; wrap it with contextlib's contextmanager or closing()."
            )
        return (stack.enter_context(manager),)
