"""One worker (copy) in a child process, from both ends of the pipes that connect it to its parent.

The parent sends ``STOP``, and later perhaps ``STOP_AT_ONCE``; a spare, which is a child without
work, gets an ``Order`` before. The child sends pairs: a processor's name with an event of its run,
or ``None`` with an event of the child itself, of which ``READY`` is the first, and ``Ended`` or a
``Trouble`` the last.

The child is spawned, because a forked child would share the parent's database connections, and its
threads' locks in whatever state they were.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import django
from django.db import connections

from dcl_processor import registry
from dcl_processor.diagnosis import ErrorInCopy, Trouble, describe
from dcl_processor.errors import represent
from dcl_processor.exceptions import ProcessorError
from dcl_processor.report import Report
from dcl_processor.watch.watch import Event

from .console_log import quiet_unless_configured
from .graceful_stop import SIGNALS, Stop, StoppedAtOnce

STOP, STOP_AT_ONCE = "stop", "stop at once"

#: The first event that a child sends: it has its signal handlers, and has loaded Django; a spare,
#: which can begin at once, has loaded the processors, too.
READY = "ready"

#: Seconds that a child has to exit after its last message.
EXIT_WITHIN = 10.0

#: The exit code of a child whose program runs the command when it is imported: EX_CONFIG.
UNGUARDED = 78

_processes = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a child whose work returned; ``had_work``: what the work returned."""

    had_work: bool


#: Sends an event of a processor to the parent; without a name, one of the child itself.
Send = Callable[[str | None, Event | Ended], None]

#: The work of a child, which is pickled; returns whether there was any until the end.
Work = Callable[[Stop, Send], bool]


@dataclass(frozen=True, slots=True)
class Order:
    """Tells a spare to begin; ``work`` stays pickled until the spare has loaded what it needs."""

    name: str
    work: bytes


#: The child's order to begin; ``None``: to end.
Orders = SimpleQueue[Order | None]


# --- the parent's end


class Child:
    """The parent's end of a child process, which is started at once; without work it is a spare."""

    def __init__(self, name: str, work: Work | None, databases: Mapping[str, Any]) -> None:
        self.is_ready = False
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
        self.is_ready = True
        return name, event

    def send(self, message: str | Order) -> None:
        # A child that has ended needs no message.
        with suppress(OSError):
            self._control.send(message)

    def begin(self, name: str, work: Work) -> None:
        """Give a spare its work, and the name of the worker whose place it takes."""
        self.send(Order(name, pickle.dumps(work)))

    def dismiss(self) -> None:
        """Let a spare end; kill one that is still loading, as it has nothing open."""
        if self.is_ready:
            self.send(STOP)
        else:
            self._process.kill()

    def stop_at_once(self) -> None:
        """Interrupt the handler; kill a child that is still starting, as it has no handler."""
        if self.is_ready or self.results.poll():
            self.send(STOP_AT_ONCE)
        else:
            self._process.kill()

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
    """Do the work, and send its events and its end."""
    stop, hurry, orders = Stop(), threading.Event(), Orders()
    _install_handlers(stop, hurry, orders)
    threading.Thread(target=_obey, args=(control, stop, hurry, orders), daemon=True).start()

    def send(name: str | None, event: Event | Ended) -> None:
        try:
            results.send((name, _picklable(event)))
        except OSError:
            stop.set()  # the parent has gone, and no process reads the messages

    try:
        end: Ended | Trouble = Ended(_run(work, databases, stop, send, orders))
    except BaseException as error:  # noqa: BLE001  # the parent decides what it means
        known = isinstance(error, ProcessorError)
        end = Trouble(str(error) if known else describe(error), traceback.format_exc())
    send(None, end)


def _run(
    work: Work | None, databases: Mapping[str, Any], stop: Stop, send: Send, orders: Orders
) -> bool:
    for alias, name in databases.items():
        connections.databases[alias]["NAME"] = name
    django.setup()
    try:
        with quiet_unless_configured():
            if work is None:
                _load_processors()
            send(None, READY)
            begun = work or _wait_for_work(orders)
            return begun is None or begun(stop, send)
    finally:
        connections.close_all()


def _load_processors() -> None:
    """Import what a worker needs, and keep no connection open that an import has opened."""
    registry.broken()  # a module that cannot be imported is reported when there is work for it
    connections.all()  # which imports the drivers
    connections.close_all()


def _wait_for_work(orders: Orders) -> Work | None:
    """Wait for the order to begin; return ``None`` if a spare is to end without one."""
    order = orders.get()
    if order is None:
        return None
    multiprocessing.current_process().name = order.name
    work: Work = pickle.loads(order.work)  # noqa: S301  # the parent's
    return work


def _install_handlers(stop: Stop, hurry: threading.Event, orders: Orders) -> None:
    """Leave it to the parent to count signals.

    A terminal sends Ctrl-C and SIGHUP to the whole process group, and a service manager sends
    SIGTERM to every process. A child gets both this signal and the parent's message, and must not
    count them as two.
    """

    def handler(signum: int, _: FrameType | None) -> None:
        stop.set()
        orders.put(None)
        if hurry.is_set():
            raise StoppedAtOnce(signum)

    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, handler)
    # The parent blocked these signals until this process had handlers for them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _obey(control: Connection, stop: Stop, hurry: threading.Event, orders: Orders) -> None:
    """Follow the parent's messages, in a thread; the end of the parent means stop."""
    main_thread = threading.main_thread().ident
    try:
        while (message := control.recv()) != STOP_AT_ONCE:
            if isinstance(message, Order):
                orders.put(message)
            else:
                stop.set()
                orders.put(None)
    except (EOFError, OSError):
        stop.set()
        orders.put(None)
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
