"""The parent's view of one worker (copy): a process that does its share of the work.

It is spawned, because a forked child would share the parent's database connections, and its
threads' locks in whatever state they were.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from dcl_processor.report import Report

from .child import READY, STOP_AT_ONCE, LastWord, Send, Trouble, Work, main, said
from .stopping import SIGNALS

#: Seconds that a worker has to exit after its last message.
EXIT_WITHIN = 10.0

#: The exit code of a worker whose program runs the command when it is imported: EX_CONFIG.
UNGUARDED = 78

_processes = multiprocessing.get_context("spawn")


class Copy:
    """The parent's view of one worker; ``outcome`` is from its last message, if there was one."""

    def __init__(self, name: str, work: Work) -> None:
        self.outcome: Report | Trouble | None = None
        self._is_ready = False
        word, self._control = _processes.Pipe(duplex=False)
        self.results, telling = _processes.Pipe(duplex=False)
        self._process = _processes.Process(target=main, args=(work, word, telling), name=name)
        self._process.start()
        # Only the child may hold these ends; otherwise the parent would not notice its death.
        word.close()
        telling.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def tell(self, word: str) -> None:
        # A worker that has ended needs no message.
        with suppress(OSError):
            self._control.send(word)

    def hear(self, take: Send) -> bool:
        """Take one message; return whether it was the last."""
        try:
            message = self.results.recv()
        except (EOFError, OSError):
            self.outcome = self._death()
            return True
        if isinstance(message, LastWord):
            self.outcome = message.outcome
            return True
        if message == READY:
            self._is_ready = True
        else:
            take(message)
        return False

    def stop_at_once(self) -> None:
        """Interrupt the handler; kill a worker that is still starting, as it has no handler."""
        if self._is_ready or self.results.poll():
            self.tell(STOP_AT_ONCE)
        else:
            self._process.kill()

    def end(self) -> None:
        """Let the process end, or end it; to be called once, whatever happened."""
        self._control.close()  # which stops a worker that is still running
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
            return Trouble(unguarded(), is_final=True)
        if code is not None and code < 0:
            how = f"killed by {_name(-code)}"
        else:
            how = f"ended with exit code {code} and without a report"
        return Trouble(f"{how}; what it had committed stays, and is in no count")


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def refuse_import() -> None:
    """End this process if it is a worker that imports the program that has started it.

    A spawned process imports the main module. If that module runs the command without a check that
    it is the main program, each worker would start workers of its own.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def unguarded() -> str:
    """Return what is missing from a program that runs the command when it is imported."""
    program = Path(sys.argv[0]).name
    return (
        f"expected {program} to run the command below \"if __name__ == '__main__':\", got a call "
        "without it, which every copy would make again when it imports the program; add that line."
    )


def start(name: str, work: Work, take: Callable[[Copy | Trouble], None]) -> None:
    """Start a process for the work, with signals blocked until it can handle them.

    ``take`` gets the process, or the reason if the system cannot start one more. This happens
    before a signal can interrupt this process: otherwise the run would wait at its end for a worker
    that it does not know.
    """
    # Started first, because it would unblock the signals that are blocked below.
    resource_tracker.ensure_running()
    # A signal that comes before the child has its handlers would kill it, or print a traceback. The
    # child inherits the blocked signals, and unblocks them when it is ready.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        take(Copy(name, work))
    except OSError as error:
        take(Trouble(f"could not be started: {said(error)}", traceback.format_exc()))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
