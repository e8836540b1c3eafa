"""One worker (copy), in its own process; the module ``process`` is the parent's side."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Protocol

import django
from django.db import connections

from dcl_processor import registry
from dcl_processor.errors import represent
from dcl_processor.exceptions import ProcessorError
from dcl_processor.processor import BatchProcessor
from dcl_processor.report import Report

from .diagnosis import describe, explain, in_doubt
from .row_callback import quiet_unless_configured, watched
from .stopping import SIGNALS, Stop, StoppedAtOnce

STOP, STOP_AT_ONCE = "stop", "stop at once"

#: What a worker sends when it is ready to be stopped.
READY = "ready"


Send = Callable[[Any], None]


class Work(Protocol):
    """The work of one worker; it is pickled and sent to the worker."""

    @property
    def databases(self) -> Mapping[str, Any]:
        """Return databases' names by alias: a test runner's names differ from the settings."""
        ...

    def run(self, stop: Stop, send: Send) -> Report | Trouble | None:
        """Do the work, in a process with Django set up; ``send`` sends to the parent."""


@dataclass(frozen=True, slots=True)
class LastWord:
    """The last message of a worker."""

    outcome: Report | Trouble | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of one run. ``deadline`` is by the monotonic clock, which processes share."""

    name: str
    databases: Mapping[str, Any]
    using: str | None
    limit: int | None
    deadline: float | None
    concurrency: int | None
    tells_rows: bool

    def run(self, stop: Stop, send: Send) -> Report | Trouble:
        """Do the run; send the outcome of each row, if wanted."""
        (processor,) = registry.get([self.name])
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            with watched(processor, send if self.tells_rows else None):
                report = processor.run(
                    using=self.using,
                    limit=self.limit,
                    timeout=left,
                    concurrency=self.concurrency,
                    stop=stop,
                )
        except Exception as error:  # noqa: BLE001  # a run that could not be made
            return Trouble.of(error, processor, self.using)
        return portable(report)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a run did not complete; ``report``: what it did until then."""

    sentence: str
    traceback: str = ""
    report: Report | None = None
    #: Whether every further try would fail in the same way.
    is_final: bool = False

    @classmethod
    def of(cls, error: Exception, processor: BatchProcessor[Any], using: str | None) -> Trouble:
        """Explain the exception that is being handled."""
        sentence, trace = explain(error, processor, using), traceback.format_exc()
        report = getattr(error, "report", None)
        if not isinstance(report, Report) or not report.did_something:
            return cls(sentence, trace)
        return cls(f"{sentence}{in_doubt(processor)}", trace, portable(report))

    @classmethod
    def of_resource(cls, error: BaseException) -> Trouble:
        """Return why no handler could be called; the traceback is in the log."""
        return cls(f"expected its resource to open, got {said(error)}.")


class ErrorInCopy(ProcessorError):
    """Stands for a row's error in another process, whose own class may not be picklable."""

    def __init__(self, text: str, representation: str) -> None:
        super().__init__(text, representation)

    def __str__(self) -> str:
        return str(self.args[0])

    def __repr__(self) -> str:
        return str(self.args[1])


def said(error: BaseException) -> str:
    """Return the kind and text of an error, wherever it was raised."""
    return str(error) if isinstance(error, ErrorInCopy) else describe(error)


def main(work: Work, control: Connection, results: Connection) -> None:
    """Do the work, and send its outcome at the end."""
    stop = Stop()
    hurry = threading.Event()
    _install_handlers(stop, hurry)
    threading.Thread(target=_obey, args=(control, stop, hurry), daemon=True).start()
    with suppress(OSError):
        results.send(READY)

    def send(message: Any) -> None:
        try:
            results.send(message)
        except OSError:
            stop.set()  # the parent has gone, and no process reads the messages

    try:
        last = _run(work, stop, send)
    except BaseException as error:  # noqa: BLE001  # the parent decides what it means
        known = isinstance(error, ProcessorError)
        last = Trouble(str(error) if known else describe(error), traceback.format_exc())
    send(LastWord(last))


def _run(work: Work, stop: Stop, send: Send) -> Report | Trouble | None:
    for alias, name in work.databases.items():
        connections.databases[alias]["NAME"] = name
    django.setup()
    try:
        with quiet_unless_configured():
            return work.run(stop, send)
    finally:
        connections.close_all()


def portable(report: Report) -> Report:
    """Return the report without errors whose classes may not be picklable."""
    failures = tuple(replace(each, error=_portable(each.error)) for each in report.failures)
    error = None if report.error is None else _portable(report.error)
    return replace(report, failures=failures, error=error)


def _portable(error: BaseException) -> ErrorInCopy:
    return ErrorInCopy(describe(error), represent(error))


def _install_handlers(stop: Stop, hurry: threading.Event) -> None:
    """Leave it to the parent to count signals.

    A terminal sends Ctrl-C and SIGHUP to the whole process group, and a service manager sends
    SIGTERM to every process. A worker gets both this signal and the parent's message, and must not
    count them as two.
    """

    def handler(signum: int, _: FrameType | None) -> None:
        stop.set()
        if hurry.is_set():
            raise StoppedAtOnce(signum)

    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, handler)
    # The parent blocked these signals until this process had handlers for them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _obey(control: Connection, stop: Stop, hurry: threading.Event) -> None:
    """Follow the parent's messages, in a thread; the end of the parent means stop."""
    main_thread = threading.main_thread().ident
    try:
        while control.recv() == STOP:
            stop.set()
    except (EOFError, OSError):
        stop.set()
        return
    hurry.set()
    if main_thread is not None:
        # Sent to the main thread: a signal to another thread would not end a wait of the handler.
        signal.pthread_kill(main_thread, signal.SIGTERM)
