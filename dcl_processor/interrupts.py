"""Errors that interrupt the worker, and so are no row's failure."""

from __future__ import annotations

import math
import traceback
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TypeVar

from dcl_processor import steady as time

T = TypeVar("T")

#: Seconds between two looks for an interrupt by a thread that waits.
LOOK = 1.0


class Interruption(BaseException):
    """Ends the run in whose handler it is raised, as Ctrl-C does; for code that tests handlers."""


class HandlerCancelled(BaseException):
    """Raised in a plain handler at its ``handler_timeout``, as asyncio cancels a coroutine.

    No ``Exception``, so that a handler that goes on after errors does not go on after this one. It
    ends a run that the handler has started.
    """


def wait_for_next(queue: SimpleQueue[T], timeout: float | None = None) -> T:
    """Return the next item of a queue; raise ``Empty`` after ``timeout`` seconds.

    Python looks for signals between two instructions. One that comes between its last look and the
    wait itself, or that the system delivers to another thread, ends no wait: without a look now
    and then, Ctrl-C would be noticed when the next handler ends.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = max(0.0, end - time.monotonic())
        try:
            return queue.get(timeout=min(left, LOOK))
        except Empty:
            if left <= LOOK:
                raise


def ends_the_run(error: BaseException) -> bool:
    """Return whether the error interrupts the worker, and so is no row's failure.

    These are Ctrl-C; ``sys.exit()`` in a signal handler, by which many programs stop; and Celery's
    soft time limit, an ``Exception`` that its signal raises at any point of the process. The last
    is matched by class name, so that Celery need not be installed. A task group puts them in a
    group. The end of a handler's time that is in one is no interrupt of the worker.
    """
    parts = [error]
    for each in parts:  # which grows meanwhile
        if isinstance(each, BaseExceptionGroup):
            parts += [part for part in each.exceptions if not isinstance(part, HandlerCancelled)]
    return any(map(_interrupts, parts))


def interrupt_behind(
    error: BaseException | None, handled: BaseException | None
) -> BaseException | None:
    """Return the interrupt that the error has hidden; ``handled``: an older error, where to end."""
    while error is not None and error is not handled:
        if ends_the_run(error):
            return error
        error = error.__context__
    return None


def _interrupts(error: BaseException) -> bool:
    if isinstance(error, KeyboardInterrupt | Interruption | HandlerCancelled):
        return True
    if isinstance(error, SystemExit):
        frames = traceback.walk_tb(error.__traceback__)
        return any(_handles_signal(frame) for frame, _ in frames)
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    return ("billiard.exceptions", "SoftTimeLimitExceeded") in kinds


def _handles_signal(frame: FrameType) -> bool:
    """Recognise a signal handler by its argument, the frame that it interrupts, its caller's.

    ``signal.getsignal()`` would not work, because many handlers uninstall themselves first.
    """
    for value in frame.f_locals.values():
        given = value if type(value) is tuple else (value,)
        if any(each is frame.f_back and isinstance(each, FrameType) for each in given):
            return True
    return False
