"""Errors that interrupt the worker, and so are no row's failure."""

from __future__ import annotations

import traceback
from types import FrameType


class Interruption(BaseException):
    """Ends the run in whose handler it is raised, as Ctrl-C does; for code that tests handlers."""


class HandlerCancelled(BaseException):
    """Raised in a plain handler at its ``handler_timeout``, as asyncio cancels a coroutine.

    No ``Exception``, so that a handler that goes on after errors does not go on after this one. It
    ends a run that the handler has started.
    """


def ends_the_run(error: BaseException) -> bool:
    """Return whether the error interrupts the worker, and so is no row's failure.

    These are Ctrl-C; ``sys.exit()`` in a signal handler, by which many programs stop; and Celery's
    soft time limit, an ``Exception`` that its signal raises at any point of the process. The last
    is matched by class name, so that Celery need not be installed.
    """
    if isinstance(error, KeyboardInterrupt | Interruption | HandlerCancelled):
        return True
    if isinstance(error, SystemExit):
        return _was_raised_by_signal(error)
    kinds = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    return ("billiard.exceptions", "SoftTimeLimitExceeded") in kinds


def _was_raised_by_signal(error: BaseException) -> bool:
    return any(_handles_signal(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _handles_signal(frame: FrameType) -> bool:
    """Recognise a signal handler by its argument, the frame that it interrupts, its caller's.

    ``signal.getsignal()`` would not work, because many handlers uninstall themselves first.
    """
    for value in frame.f_locals.values():
        given = value if type(value) is tuple else (value,)
        if any(each is frame.f_back and isinstance(each, FrameType) for each in given):
            return True
    return False
