"""One worker in a child process, from both ends of the pipe that connects it to its parent.

The parent sends ``STOP``, and later perhaps ``STOP_AT_ONCE``. The child sends pairs: a processor's
name with an event of its run, or ``None`` with an event of the child itself: a ``Beat`` each
second, and last ``Ended`` or a ``Trouble``.

The child is the same command line, started once more: all that the program prepares before it runs
the command, such as a driver or an importer of settings, is prepared in each worker, too. A forked
child would share the parent's database connections, and its threads' locks in whatever state they
were.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from django.db import connections

from dcl_processor import worker
from dcl_processor.exceptions import ProcessorError
from dcl_processor.operator.diagnosis import Trouble, describe, one_line
from dcl_processor.report.report import Report
from dcl_processor.watch.watch import Event

from .graceful_stop import SIGNALS, Stop, StoppedAtOnce, replaced
from .monitor import Life, Monitor
from .news import Beat, Inbox, Outbox
from .visible import quiet_unless_configured

STOP, STOP_AT_ONCE = "stop", "stop at once"

#: Seconds that a child has to exit after its last message.
EXIT_WITHIN = 10.0

#: Seconds between two looks at a child that is ending. None of its files tells when it has ended:
#: it may have closed its pipe long before, and what it has forked may keep it open.
SOON = 0.01

#: The environment of a child: the files that it has from its parent, by their numbers.
FILES = "DCL_PROCESSOR_WORKER"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a child whose work returned; ``had_work``: what the work returned."""

    had_work: bool


#: Sends an event of a processor to the parent; without a name, one of the child itself.
Send = Callable[[str | None, Event | Beat | Ended], None]

#: The work of a child, which is pickled; returns whether there was any until the end.
Work = Callable[[Stop, Send], bool]


# --- the parent's end


class Child:
    """The parent's end of a child process, which is started at once.

    ``limit``: of ``Life``. ``now``: the parent's own time (``OwnTime``), here and in the
    methods.
    """

    def __init__(
        self, number: int, work: Work, databases: Mapping[str, Any], limit: float | None, now: float
    ) -> None:
        self.pipe, theirs = Pipe()
        self._inbox = Inbox(self.pipe)
        # A file, because a pipe that is full would make the parent wait for a child that loads.
        # Only the child may hold its end; otherwise the parent would not notice its death.
        with theirs, TemporaryFile() as task:
            pickle.dump((number, work, databases), task)
            task.seek(0)
            files = task.fileno(), theirs.fileno()
            arguments, variables = _same_command()
            variables[FILES] = ",".join(map(str, files))
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, env=variables, pass_fds=files
            )
        self.pid = self._process.pid
        self.life = Life(limit, now)
        #: Whether a run has reported its end; a watch reports that of each of its runs.
        self.has_reported = False
        self._last: Ended | Trouble | None = None
        self._end_by: float | None = None
        self._is_to_stop = False
        self._fault: str | None = None

    def receive(self, now: float) -> Iterator[tuple[str | None, Any]]:
        """Yield the messages that have come, without waiting for the rest of one.

        With the last message, which is not yielded, or with the end of the pipe the child begins
        to end.
        """
        try:
            messages = self._inbox.take()
        except (EOFError, OSError):
            self.begin_end(now)
            return
        for name, event in messages:
            self.life.hear(now, event)
            if name is None and isinstance(event, Ended | Trouble):
                self.begin_end(now, event)
                return
            self.has_reported |= isinstance(event, Report | Trouble)
            yield name, event

    def stop(self) -> None:
        """Let it finish its rows."""
        if not self._is_to_stop:
            self._is_to_stop = True
            self._send(STOP)

    def stop_at_once(self) -> None:
        """Interrupt the handler; kill a child that is loading: it has no row."""
        if not self.is_ending and not self.life.is_loaded and not self.pipe.poll():
            self._process.kill()
        else:
            self._send(STOP_AT_ONCE)

    def _send(self, message: str) -> None:
        # A child that has ended needs no message.
        with suppress(OSError):
            self.pipe.send(message)

    def kill_if_silent(self, now: float) -> None:
        """Kill it if it does not move."""
        if not self.is_ending and self._fault is None:
            self._fault = self.life.fault(now)
            if self._fault is not None:
                self._process.kill()

    @property
    def was_late(self) -> bool:
        """Whether a child that has gone was killed: its handler did not end, or it did not move."""
        return self._fault is not None

    def begin_end(self, now: float, last: Ended | Trouble | None = None) -> None:
        """Let the process end, without waiting for it: ``has_gone()`` does the rest.

        ``last``: its last message. None is read after it.
        """
        self.pipe.close()
        self._last, self._end_by = last, now + EXIT_WITHIN

    @property
    def is_ending(self) -> bool:
        """Whether the end of the process has begun, and its messages are not read any more."""
        return self._end_by is not None

    def is_alive(self, now: float) -> bool:
        """Return whether it moves, or has come to its end."""
        return self.is_ending or not self.life.is_silent(now)

    def has_gone(self, now: float) -> bool:
        """Return whether the process has ended; to be called again and again until it has.

        Kills a process that does not end in time.
        """
        if self._process.poll() is not None:
            # What the handler has forked may keep the pipe open for as long as it likes.
            return self.is_ending or not self.pipe.poll()
        if self._end_by is not None and now >= self._end_by:
            self._process.kill()
        return False

    def outcome(self) -> Ended | Trouble:
        """Return how a child has ended that has gone: its last message, or how it died."""
        self.pipe.close()
        if self._last is not None:
            return self._last
        code = self._process.returncode
        if self._fault is None and code == -signal.SIGKILL:
            self._fault = self.life.own_fault()
        if self._fault is not None:
            how = f"killed: {self._fault}"
        elif code < 0:
            how = f"killed by {_name(-code)}"
        else:
            how = f"ended with exit code {code} and without a report"
        return Trouble(f"{how}; its committed work stays, but is not counted")


def _same_command() -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment with which this program was started.

    If it is another program that calls the command, which may do more than that: those of Django's
    own command, with the same path for imports.
    """
    if is_program():
        program = main = sys.argv[0]
        if not Path(program).exists():  # it has changed its folder
            main = getattr(sys.modules["__main__"], "__file__", program)
        started = [main if each == program else each for each in sys.orig_argv[1:]]
        return [sys.executable, *started], {**os.environ}
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    django = [sys.executable, "-m", "django", "processors", "list"]
    return django, {**os.environ, "PYTHONPATH": path}


def is_program() -> bool:
    """Return whether this program is ``manage.py processors`` or the like."""
    return sys.argv[1:2] == ["processors"]


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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the child's end


def main(files: str) -> None:
    """Do the work, and send its events and its end; ``files``: of ``FILES``."""
    task, pipe = map(int, files.split(","))
    with os.fdopen(task, "rb") as file:
        worker.number, work, databases = pickle.load(file)  # noqa: S301  # from our own parent
    do(work, databases, Connection(pipe))


def do(work: Work, databases: Mapping[str, Any], pipe: Connection) -> None:
    """Do the work at the end of the pipe."""
    stop, hurry = Stop(), threading.Event()
    _install_handlers(stop, hurry)
    send = Outbox(pipe, stop).send
    threading.Thread(target=_obey, args=(pipe, stop, hurry), daemon=True).start()
    # Ends a handler that did not end when it was interrupted; the parent knows from the beat.
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    end: Ended | Trouble
    try:
        with ExitStack() as stack:
            # What is left to do then is to send how the work ended.
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
            stack.enter_context(_connected(databases))
            stack.enter_context(Monitor(partial(send, None), kill=die))
            end = Ended(work(stop, send))
    except BaseException as error:  # noqa: BLE001  # the parent decides what it means
        known = isinstance(error, ProcessorError)
        end = Trouble(one_line(error) if known else describe(error), traceback.format_exc())
    send(None, end)


@contextmanager
def _connected(databases: Mapping[str, Any]) -> Iterator[None]:
    """Use the parent's databases, which may be a test's; close the connections at the end."""
    connections.close_all()
    for alias, name in databases.items():
        connections.databases[alias]["NAME"] = name
    try:
        with quiet_unless_configured():
            yield
    finally:
        connections.close_all()


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
    replaced.append({signal.SIGTERM: signal.SIG_DFL})
    signal.signal(signal.SIGTERM, handler)
    # The parent blocked these signals until this process had handlers for them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _obey(pipe: Connection, stop: Stop, hurry: threading.Event) -> None:
    """Follow the parent's messages, in a thread; the end of the parent means stop."""
    main_thread = threading.main_thread().ident
    try:
        while pipe.recv() == STOP:
            stop.set()
    except (EOFError, OSError):
        stop.set()
        return
    hurry.set()
    if main_thread is not None:
        # Sent to the main thread: a signal to another thread would not end a wait of the handler.
        signal.pthread_kill(main_thread, signal.SIGTERM)
