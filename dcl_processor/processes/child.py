"""One worker in a child process, from both ends of the pipes that connect it to its parent.

The parent sends ``STOP``, and later perhaps ``STOP_AT_ONCE``. The child sends pairs: a processor's
name with an event of its run, or ``None`` with an event of the child itself: each new ``Phase``,
and last ``Ended`` or a ``Trouble``. The child sends a ``Beat`` each second through a second pipe,
so other messages do not delay it.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from django.db import connections

from dcl_processor import steady as time
from dcl_processor import worker
from dcl_processor.diagnosis import Trouble, describe, one_line
from dcl_processor.exceptions import ProcessorError
from dcl_processor.watch.watch import Event

from .beats import Beat, lasted
from .graceful_stop import SIGNALS, Stop, StoppedAtOnce
from .monitor import Monitor, OwnTime
from .results import Inbox, Results
from .visible import quiet_unless_configured

STOP, STOP_AT_ONCE = "stop", "stop at once"

#: Seconds that a child has to exit after its last message, and then to die after it was killed.
EXIT_WITHIN, DIES_WITHIN = 10.0, 10.0

#: Seconds between two looks at a child that is ending. None of its files tells when it has ended:
#: it may have closed its pipes long before, and what it has forked may keep them open.
SOON = 0.01

#: The environment of a child: the files that it has from its parent, by their numbers.
FILES = "DCL_PROCESSOR_WORKER"


class Phase(Enum):
    """How far a child has come, as far as its parent knows."""

    #: It loads Django.
    LOADING = "loading"
    WORKING = "working"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a child whose work returned; ``had_work``: what the work returned."""

    had_work: bool


#: Sends an event of a processor to the parent; without a name, one of the child itself.
Send = Callable[[str | None, Event | Phase | Ended], None]

#: The work of a child, which is pickled; returns whether there was any until the end.
Work = Callable[[Stop, Send], bool]


# --- the parent's end


class Child:
    """The parent's end of a child process, which is started at once."""

    def __init__(self, number: int, work: Work, databases: Mapping[str, Any]) -> None:
        self.phase = Phase.LOADING
        control, self._control = Pipe(duplex=False)
        self.results, results = Pipe(duplex=False)
        self._beats, beats = Pipe(duplex=False)
        self._inbox, self._beats_inbox = Inbox(self.results), Inbox(self._beats)
        ends = (control, results, beats)
        # A file, because a pipe that is full would make the parent wait for a child that loads.
        with TemporaryFile() as task:
            pickle.dump((number, work, databases), task)
            task.seek(0)
            files = [each.fileno() for each in (task, *ends)]
            arguments, variables = _same_command()
            variables[FILES] = ",".join(map(str, files))
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, env=variables, pass_fds=files
            )
        self.pid = self._process.pid
        self._last: Ended | Trouble | None = None
        self._end_by: float | None = None
        self._killed_for: str | None = None
        self._killed_at: float | None = None
        #: Whether it could not be killed, and has not sent its last message.
        self.is_left_behind = False
        # Only the child may hold these ends; otherwise the parent would not notice its death.
        for each in ends:
            each.close()

    def receive(self, now: float) -> Iterator[tuple[str | None, Any]]:
        """Yield the messages that have come, without waiting for the rest of one.

        With the last message, which is not yielded, or with the end of the pipe the child begins
        to end. ``now``: the parent's own time (``OwnTime``), here and in the other methods.
        """
        try:
            messages = self._inbox.take()
        except (EOFError, OSError):
            self.begin_end(now)
            return
        for name, event in messages:
            if name is None and isinstance(event, Ended | Trouble):
                self.begin_end(now, event)
                return
            if isinstance(event, Phase):
                self.phase = event
            yield name, event

    def last_beat(self) -> Beat | None:
        """Return the last of the beats that have come since the last call."""
        beat = None
        with suppress(EOFError, OSError):
            while beats := self._beats_inbox.take():
                beat = beats[-1]
        return beat

    def send(self, message: str) -> None:
        # A child that has ended needs no message.
        with suppress(OSError):
            self._control.send(message)

    def stop_at_once(self) -> None:
        """Interrupt the handler; kill a child that is loading: it has no row."""
        if self.phase is Phase.LOADING and not self.results.poll():
            self._process.kill()
        else:
            self.send(STOP_AT_ONCE)

    def kill(self, why: str, now: float) -> None:
        """Kill the process; ``why``: the sentence of its death."""
        self._killed_for, self._killed_at = why, now
        self._process.kill()

    def begin_end(self, now: float, last: Ended | Trouble | None = None) -> None:
        """Let the process end, without waiting for it: ``has_gone()`` does the rest.

        ``last``: its last message. None is read after it.
        """
        self._control.close()
        self._last, self._end_by = last, now + EXIT_WITHIN

    @property
    def is_ending(self) -> bool:
        """Whether the end of the process has begun, and its messages are not read any more."""
        return self._end_by is not None

    def has_gone(self, now: float) -> bool:
        """Return whether the process has ended; to be called again and again until it has.

        Kills a process that does not end in time. One that waits in the kernel, for a file server
        for instance, cannot be killed, and is left behind: it counts as gone.
        """
        if self._process.poll() is not None:
            # What the handler has forked may keep the pipe open for as long as it likes.
            return self.is_ending or not self.results.poll()
        if self._killed_at is not None:
            is_lost = now - self._killed_at > DIES_WITHIN
            self.is_left_behind = is_lost and self._last is None
            return is_lost
        if self._end_by is not None and now >= self._end_by:
            self.kill(f"it closed its pipe, and did not end within {EXIT_WITHIN:g} s", now)
        return False

    def close(self) -> None:
        """Free what belongs to a child that has gone."""
        for each in (self._control, self.results, self._beats):
            each.close()
        # One that cannot be killed is left behind knowingly.
        self._process.returncode = self._process.poll() or 0

    def outcome(self) -> Ended | Trouble:
        """Return how a child has ended that has gone: its last message, or how it died."""
        if self._last is not None:
            return self._last
        code = self._process.poll()
        if self.is_left_behind:
            return Trouble(
                f"process {self.pid} was killed {lasted(DIES_WITHIN)} ago, and has not ended: "
                f"{self._killed_for}; no other process takes its place"
            )
        if self._killed_for is not None:
            return Trouble(
                f"killed by the supervisor: {self._killed_for}; its committed work stays, but is "
                "not counted"
            )
        if code is not None and code < 0:
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


def end_all(children: Collection[Child], own_time: OwnTime) -> None:
    """Wait until all of these children have ended, each of them in the same seconds."""
    for each in children:
        each.begin_end(own_time.pass_())
    left = list(children)
    while left := [each for each in left if not each.has_gone(own_time.pass_())]:
        time.sleep(SOON)
    for each in children:
        each.close()


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


@contextmanager
def exit_codes_kept() -> Iterator[None]:
    """Give SIGCHLD its default action in the block if it is ignored, as after some launchers.

    Otherwise the system frees the pid of a child as soon as it ends, Python never learns that it
    has ended, and a signal that is sent to the pid may reach another process. Outside the main
    thread, where Python sets no action, it stays as it is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


# --- the child's end


def main(files: str) -> None:
    """Do the work, and send its events and its end; ``files``: of ``FILES``."""
    task, *ends = map(int, files.split(","))
    with os.fdopen(task, "rb") as file:
        worker.number, work, databases = pickle.load(file)  # noqa: S301  # from our own parent
    do(work, databases, *map(Connection, ends))


def do(
    work: Work,
    databases: Mapping[str, Any],
    control: Connection,
    results: Connection,
    beats: Connection,
) -> None:
    """Do the work between the ends of the pipes."""
    stop, hurry = Stop(), threading.Event()
    _install_handlers(stop, hurry)
    to_parent = Results(results, beats, stop)
    send = to_parent.send
    monitor = Monitor(to_parent.beat, stop, is_supervised=True)
    threading.Thread(target=_obey, args=(control, stop, hurry, monitor), daemon=True).start()
    end: Ended | Trouble
    try:
        with _undisturbed_end(), _connected(databases):
            send(None, Phase.WORKING)
            with monitor:
                end = Ended(work(stop, send))
    except BaseException as error:  # noqa: BLE001  # the parent decides what it means
        known = isinstance(error, ProcessorError)
        end = Trouble(one_line(error) if known else describe(error), traceback.format_exc())
    send(None, end)


@contextmanager
def _undisturbed_end() -> Iterator[None]:
    """Ignore signals from the end of the block: what is left is to send how the work ended."""
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


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
    signal.signal(signal.SIGTERM, handler)
    # The parent blocked these signals until this process had handlers for them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _obey(control: Connection, stop: Stop, hurry: threading.Event, monitor: Monitor) -> None:
    """Follow the parent's messages, in a thread; the end of the parent means stop."""
    main_thread = threading.main_thread().ident
    try:
        while control.recv() == STOP:
            stop.set()
            monitor.look_now()  # so that the parent can name the row that is being finished
    except (EOFError, OSError):
        stop.set()
        return
    hurry.set()
    if main_thread is not None:
        # Sent to the main thread: a signal to another thread would not end a wait of the handler.
        signal.pthread_kill(main_thread, signal.SIGTERM)
