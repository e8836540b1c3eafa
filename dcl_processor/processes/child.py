"""One worker (copy) in a child process, from both ends of the pipes that connect it to its parent.

The parent sends ``STOP``, and later perhaps ``STOP_AT_ONCE``; to a spare, which is a child without
work, it first sends an ``Order``. The child sends pairs: a processor's name with an event of its
run, or ``None`` with an event of the child itself: each new ``Phase``, and last ``Ended`` or a
``Trouble``.

The child is spawned, because a forked child would share the parent's database connections, and its
threads' locks in whatever state they were.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import django
from django.db import connections

from dcl_processor import registry
from dcl_processor.diagnosis import ErrorInCopy, Trouble, describe
from dcl_processor.errors import represent
from dcl_processor.exceptions import ProcessorError
from dcl_processor.report import Report
from dcl_processor.watch.polling import POLL_IDLE
from dcl_processor.watch.watch import Event

from .console_log import quiet_unless_configured
from .graceful_stop import SIGNALS, Stop, StoppedAtOnce

STOP, STOP_AT_ONCE = "stop", "stop at once"

#: Seconds that a child has to exit after its last message.
EXIT_WITHIN = 10.0

#: The exit code of a child whose program runs the command when it is imported: EX_CONFIG.
UNGUARDED = 78

_processes = multiprocessing.get_context("spawn")


class Phase(Enum):
    """How far a child has come, as far as its parent knows."""

    #: It loads Django, and a spare the processors, too.
    LOADING = "loading"
    #: It is a spare, and has not read an order yet.
    WAITING = "waiting"
    WORKING = "working"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a child whose work returned; ``had_work``: what the work returned."""

    had_work: bool


#: Sends an event of a processor to the parent; without a name, one of the child itself.
Send = Callable[[str | None, Event | Phase | Ended], None]

#: The work of a child, which is pickled; returns whether there was any until the end.
Work = Callable[[Stop, Send], bool]


@dataclass(frozen=True, slots=True)
class Order:
    """Gives a waiting spare its work, and the name of the worker whose place it takes."""

    name: str
    work: Work


# --- the parent's end


class Child:
    """The parent's end of a child process, which is started at once; without work it is a spare."""

    def __init__(self, name: str, work: Work | None, databases: Mapping[str, Any]) -> None:
        self.phase = Phase.LOADING
        control, self._control = _processes.Pipe(duplex=False)
        self.results, results = _processes.Pipe(duplex=False)
        ends = (control, results)
        self._process = _processes.Process(target=main, args=(work, databases, *ends), name=name)
        self._process.start()
        self.pid = self._process.pid
        # Only the child may hold these ends; otherwise the parent would not notice its death.
        control.close()
        results.close()

    def receive(self) -> tuple[str | None, Any]:
        """Return the next message; after a death without a last message, a ``Trouble``."""
        try:
            name, event = self.results.recv()
        except (EOFError, OSError):
            return None, self._death()
        if isinstance(event, Phase):
            self.phase = event
        return name, event

    def send(self, message: str | Order) -> None:
        # A child that has ended needs no message.
        with suppress(OSError):
            self._control.send(message)

    def stop_at_once(self) -> None:
        """Interrupt the handler, or end a spare; kill a child that is loading: it has no row."""
        if self.phase is Phase.LOADING and not self.results.poll():
            self._process.kill()
        else:
            self.send(STOP_AT_ONCE)

    def end(self) -> None:
        """Let the process end, or end it; to be called once, whatever happened."""
        self._control.close()  # which stops a child that is still running
        self._process.join(EXIT_WITHIN)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.results.close()
        self._process.close()

    def _death(self) -> Trouble:
        self._process.join(EXIT_WITHIN)
        code = self._process.exitcode
        if code == UNGUARDED:
            program = Path(sys.argv[0]).name
            guard = "\"if __name__ == '__main__':\""
            sentence = (
                f"expected {program} to run the command below {guard}, got a call without it, "
                "which each worker would repeat when it imports the program; add that line."
            )
            return Trouble(sentence, is_final=True)
        if code is not None and code < 0:
            how = f"killed by {_name(-code)}"
        else:
            how = f"ended with exit code {code} and without a report"
        return Trouble(f"{how}; its committed work stays, but is not counted")


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals while a child is started and noted.

    A signal that comes before the child has its handlers would kill it, or print a traceback. The
    child inherits the blocked signals, and unblocks them when it is ready. A signal that interrupts
    the parent before it has noted the child would leave a child that the parent does not end.
    """
    # Started first, because it would unblock the signals that are blocked below.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the child's end


def main(
    work: Work | None, databases: Mapping[str, Any], control: Connection, results: Connection
) -> None:
    """Do the work, and send its events and its end; without work, wait for an order first."""
    stop, hurry = Stop(), threading.Event()
    _install_handlers(stop, hurry)
    obey = threading.Thread(target=_obey, args=(control, stop, hurry), daemon=True)
    if work is not None:
        obey.start()

    def send(name: str | None, event: Event | Phase | Ended) -> None:
        try:
            results.send((name, _picklable(event)))
        except OSError:
            stop.set()  # the parent has gone, and no process reads the messages

    try:
        with _django(databases):
            if work is None:
                _load_processors()
                send(None, Phase.WAITING)
                work = _wait_for_work(control, stop)
                obey.start()
            end: Ended | Trouble = Ended(work is None or _begin(work, stop, send))
    except BaseException as error:  # noqa: BLE001  # the parent decides what it means
        known = isinstance(error, ProcessorError)
        end = Trouble(str(error) if known else describe(error), traceback.format_exc())
    send(None, end)


@contextmanager
def _django(databases: Mapping[str, Any]) -> Iterator[None]:
    """Load Django, with the parent's databases; close the connections at the end."""
    for alias, name in databases.items():
        connections.databases[alias]["NAME"] = name
    django.setup()
    try:
        with quiet_unless_configured():
            yield
    finally:
        connections.close_all()


def _load_processors() -> None:
    """Import what a worker needs, and keep no connection open that an import has opened."""
    registry.broken()  # a module that cannot be imported is reported when there is work for it
    connections.all()  # which imports the drivers
    connections.close_all()


def _wait_for_work(control: Connection, stop: Stop) -> Work | None:
    """Return the work that a spare is ordered to do; ``None`` if the spare is to end."""
    while not stop.is_set():
        if control.poll(POLL_IDLE):
            try:
                order = control.recv()
            except (EOFError, OSError):  # the parent has gone
                return None
            if not isinstance(order, Order):
                return None
            multiprocessing.current_process().name = order.name
            return order.work
    return None


def _begin(work: Work, stop: Stop, send: Send) -> bool:
    send(None, Phase.WORKING)
    return work(stop, send)


def _install_handlers(stop: Stop, hurry: threading.Event) -> None:
    """Leave it to the parent to count signals.

    A terminal sends Ctrl-C and SIGHUP to the whole process group, and a service manager sends
    SIGTERM to every process. A child gets both this signal and the parent's message, and must not
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


def _picklable(event: Any) -> Any:
    if isinstance(event, Report):
        return portable(event)
    if isinstance(event, Trouble) and event.report is not None:
        return replace(event, report=portable(event.report))
    return event


def portable(report: Report) -> Report:
    """Return the report without errors whose classes may not be picklable."""
    failures = tuple(replace(each, error=_portable(each.error)) for each in report.failures)
    error = None if report.error is None else _portable(report.error)
    return replace(report, failures=failures, error=error)


def _portable(error: BaseException) -> ErrorInCopy:
    return ErrorInCopy(describe(error), represent(error))


def refuse_import() -> None:
    """End this process if it is a child that imports the program that has started it.

    A spawned process imports the main module. If that module runs the command without a check that
    it is the main program, each child would start children of its own.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)
