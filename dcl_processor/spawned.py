"""One copy, in a process of its own; ``workers`` is the parent's side."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import django
from django.db import connections

from . import registry
from .definition import BatchProcessor
from .diagnosis import describe, explain
from .exceptions import ProcessorError
from .report import Failure, Report
from .stopping import SIGNALS, Stop, StoppedAtOnce
from .watching import quiet_unless_configured, watched

STOP, STOP_AT_ONCE = "stop", "stop at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one copy is to do. ``deadline`` is of the monotonic clock, which processes share."""

    name: str
    #: The names of the databases by alias: under a test runner they are not those in the settings.
    databases: Mapping[str, Any]
    using: str | None
    limit: int | None
    deadline: float | None
    concurrency: int
    tells_rows: bool


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no report."""

    sentence: str
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception, processor: BatchProcessor[Any], using: str | None) -> Trouble:
        """Explain the exception that is being handled."""
        return cls(explain(error, processor, using), traceback.format_exc())


class ErrorInCopy(ProcessorError):
    """Stands for a row's error in another process, whose own class may not travel."""

    def __init__(self, text: str, representation: str) -> None:
        super().__init__(text, representation)

    def __str__(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        return str(self.args[1])


def main(share: Share, control: Connection, results: Connection) -> None:
    """Run the share; send row outcomes, if wanted, and at last a ``Report`` or ``Trouble``."""
    stop = Stop()
    hurry = threading.Event()
    _install_handlers(stop, hurry)
    threading.Thread(target=_obey, args=(control, stop, hurry), daemon=True).start()
    try:
        last: Report | Trouble = _run(share, stop, results)
    except BaseException as error:  # noqa: BLE001  # the parent decides what it means
        known = isinstance(error, ProcessorError)
        last = Trouble(str(error) if known else describe(error), traceback.format_exc())
    try:
        results.send(last)
    except OSError:
        return  # the parent has gone, and took whoever wanted to know with it


def _run(share: Share, stop: Stop, results: Connection) -> Report | Trouble:
    for alias, name in share.databases.items():
        connections.databases[alias]["NAME"] = name
    django.setup()
    (processor,) = registry.get([share.name])

    def tell(outcome: str) -> None:
        try:
            results.send(outcome)
        except OSError:
            stop.set()  # nobody is left to tell

    left = None if share.deadline is None else max(0.0, share.deadline - time.monotonic())
    try:
        with quiet_unless_configured(), watched(processor, tell if share.tells_rows else None):
            report = processor.run(
                using=share.using,
                limit=share.limit,
                timeout=left,
                concurrency=share.concurrency,
                stop=stop,
            )
    except Exception as error:  # noqa: BLE001  # a run that could not be made
        return Trouble.of(error, processor, share.using)
    finally:
        connections.close_all()
    return replace(report, failures=tuple(_portable(failure) for failure in report.failures))


def _portable(failure: Failure) -> Failure:
    error = ErrorInCopy(describe(failure.error), repr(failure.error))
    return replace(failure, error=error)


def _install_handlers(stop: Stop, hurry: threading.Event) -> None:
    """Leave it to the parent to count signals.

    A terminal sends Ctrl-C to the whole process group, and a service manager its SIGTERM to every
    process: a copy gets both that one and the parent's word, and must not take them for two.
    """

    def handler(signum: int, _: FrameType | None) -> None:
        stop.set()
        if hurry.is_set():
            raise StoppedAtOnce(signum)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, handler)
    # Blocked by the parent until there was somebody to handle them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _obey(control: Connection, stop: Stop, hurry: threading.Event) -> None:
    """Do what the parent says, in a thread; the end of the parent says stop."""
    main_thread = threading.main_thread().ident
    try:
        while control.recv() == STOP:
            stop.set()
    except (EOFError, OSError):
        stop.set()
        return
    hurry.set()
    if main_thread is not None:
        # To that thread, since a signal that another one gets ends no wait of the handler's.
        signal.pthread_kill(main_thread, signal.SIGTERM)
