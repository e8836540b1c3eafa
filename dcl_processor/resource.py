"""What a handler needs open: opened late, kept, and opened anew after a failure."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .definition import BatchProcessor

logger = logging.getLogger("dcl_processor")


class Resource:
    """The processor's ``resource()`` in one run; used by one thread.

    ``broken``: it could not be opened. No row is to blame for that, so none is charged.
    """

    def __init__(self, processor: BatchProcessor[Any]) -> None:
        self._processor = processor
        self._stack = ExitStack()
        self._arguments: tuple[Any, ...] | None = None
        self.broken = False

    def ready(self) -> bool:
        """Open it unless it is open; return whether a handler may be called."""
        if self._arguments is None and not self.broken:
            try:
                manager = self._processor.resource()
                self._arguments = self._enter(manager)
            except Exception:
                self.broken = True
                logger.exception("%s: the resource could not be opened", self._processor.name)
        return not self.broken

    def arguments(self) -> tuple[Any, ...]:
        """Return what the handler gets beside its row: the resource, or nothing."""
        return self._arguments or ()

    def close(self) -> None:
        """Close it; the next ``ready()`` opens it anew. An error is logged: the rows are done."""
        self._arguments = None
        try:
            self._stack.close()
        except Exception:
            logger.exception("%s: the resource could not be closed", self._processor.name)

    def _enter(self, manager: AbstractContextManager[Any] | None) -> tuple[Any, ...]:
        return () if manager is None else (self._stack.enter_context(manager),)
