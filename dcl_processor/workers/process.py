"""The parent's view of one copy: a process that does its share of the work.

It is spawned, since a forked child would share the parent's database connections, and its
threads' locks in whatever state they were.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from contextlib import suppress
from multiprocessing import resource_tracker

from dcl_processor.report import Report

from .spawned import LastWord, Send, Trouble, Work, main, said
from .stopping import SIGNALS

#: Seconds for a copy that has said its last word to end by itself.
EXIT_WITHIN = 10.0

_processes = multiprocessing.get_context("spawn")


class Copy:
    """The parent's view of one copy; ``outcome`` is what it said at its end, if anything."""

    def __init__(self, name: str, work: Work) -> None:
        self.outcome: Report | Trouble | None = None
        word, self._control = _processes.Pipe(duplex=False)
        self.results, telling = _processes.Pipe(duplex=False)
        self._process = _processes.Process(target=main, args=(work, word, telling), name=name)
        self._process.start()
        # Only the child may hold these ends, or its death would not be seen.
        word.close()
        telling.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def tell(self, word: str) -> None:
        # One that has ended needs no telling.
        with suppress(OSError):
            self._control.send(word)

    def hear(self, take: Send) -> bool:
        """Take one message; return whether it was the last."""
        try:
            message = self.results.recv()
        except (EOFError, OSError):
            self.outcome = Trouble(self._death())
            return True
        if isinstance(message, LastWord):
            self.outcome = message.outcome
            return True
        take(message)
        return False

    def end(self) -> None:
        """Let the process end, or end it; to be called once, whatever happened."""
        self._control.close()  # which says stop to one that is still running
        self._process.join(EXIT_WITHIN)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.results.close()
        self._process.close()

    def _death(self) -> str:
        self._process.join(EXIT_WITHIN)
        code = self._process.exitcode
        if code is not None and code < 0:
            how = f"killed by {_name(-code)}"
        else:
            how = f"ended with exit code {code} and without a report"
        return f"{how}; what it had committed is done, and in no count"


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def start(name: str, work: Work) -> Copy | Trouble:
    """Start a process for the work, out of reach of signals until it can handle them.

    Returns why there is none where the system has no room for one more.
    """
    # Started first, since it would unblock the signals that are blocked below.
    resource_tracker.ensure_running()
    # A signal that comes before the child has its handlers would kill it, or print a traceback;
    # it inherits the blocking, and ends it when it is ready.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return Copy(name, work)
    except OSError as error:
        return Trouble(f"could not be started: {said(error)}", traceback.format_exc())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
