"""Both ends of the pipe from a child to its parent, and the child's end of that for its beats."""

from __future__ import annotations

import logging
import os
import pickle
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from dcl_processor.diagnosis import ErrorInWorker, Trouble, describe
from dcl_processor.errors import represent
from dcl_processor.report import Report
from dcl_processor.signals import OnRow

from .beats import Beat
from .news import Died, Finishing, News

#: In front of each message: its length.
_length = struct.Struct("!I")

#: Bytes that are read at once.
_READ = 1 << 16


class Inbox:
    """The parent's end, which never waits for the rest of a message.

    A child may be stopped, or die, in the middle of one, and what it has forked may keep the pipe
    open.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._read = bytearray()
        os.set_blocking(pipe.fileno(), False)

    def take(self) -> list[Any]:
        """Return the messages that are here as a whole; raises ``EOFError`` at the end."""
        try:
            found = os.read(self._pipe.fileno(), _READ)
        except BlockingIOError:
            return []
        if not found:
            raise EOFError
        self._read += found
        messages = []
        while len(self._read) >= _length.size:
            end = _length.size + _length.unpack_from(self._read)[0]
            if len(self._read) < end:
                break
            message = self._read[_length.size : end]
            messages.append(pickle.loads(message))  # noqa: S301  # from a process of our own
            del self._read[:end]
        return messages


class Results:
    """Sends messages to the parent; ``stop`` is set when the parent has gone."""

    def __init__(self, pipe: Connection, beats: Connection, stop: threading.Event) -> None:
        self._pipe = pipe
        self._beats = beats
        self._stop = stop
        self._lock = threading.Lock()
        #: What the pipe has not taken of the last beat of which it has taken a part.
        self._rest = b""
        os.set_blocking(beats.fileno(), False)

    def send(self, name: str | None, event: Any) -> None:
        """Send an event of a processor, or, without a name, of the child itself."""
        left = memoryview(_framed((name, _picklable(event))))
        with self._lock:
            try:
                while left:
                    left = left[os.write(self._pipe.fileno(), left) :]
            except OSError:
                self._stop.set()  # no process reads the messages

    def beat(self, beat: Beat) -> None:
        """Send a beat, unless it would have to wait: for a parent that is stopped, for instance.

        Its pipe is its own: a message that waits for its parent does not hold it up.
        """
        try:
            # A pipe may take a part of more than PIPE_BUF bytes, of which POSIX guarantees 512.
            if self._rest:
                self._rest = self._rest[os.write(self._beats.fileno(), self._rest) :]
            if not self._rest:
                message = _framed(beat)
                self._rest = message[os.write(self._beats.fileno(), message) :]
        except BlockingIOError:
            return
        except OSError:
            self._stop.set()


def _framed(message: Any) -> bytes:
    pickled = pickle.dumps(message)
    return _length.pack(len(pickled)) + pickled


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


def _portable(error: BaseException) -> ErrorInWorker:
    return ErrorInWorker(describe(error), represent(error))


# --- what became of the workers of one run, each of which may have had a successor


logger = logging.getLogger("dcl_processor")


class Outcomes:
    """The outcomes of the workers of one run; ``limits``: the rows that each may still try."""

    def __init__(
        self,
        name: str,
        limits: list[int | None],
        on_row: OnRow | None,
        on_finishing: Callable[[int, Finishing], None],
    ) -> None:
        self.limits = limits
        self._name = name
        self._on_row = on_row
        self._on_finishing = on_finishing
        self._outcomes: dict[int, Report | Trouble] = {}
        self._deaths: dict[int, list[Trouble]] = {}

    def tell(self, number: int, _: str | None, event: News) -> None:
        """Take what happened to a worker."""
        match event:
            case str():
                self._count(number)
                if self._on_row is not None:
                    self._on_row(event)
            case Report() | Trouble():
                self._outcomes[number] = event
            case Died() if number not in self._outcomes:
                # A worker that dies after its report has done all of its work.
                self._deaths.setdefault(number, []).append(event.trouble)
                logger.error("%s, worker %d: %s", self._name, number, event.trouble.sentence)
            case Finishing():
                self._on_finishing(number, event)

    def in_order(self) -> list[Report | Trouble]:
        """Return one outcome for each worker, by number."""
        numbers = sorted({*self._outcomes, *self._deaths})
        return [self._of(number) for number in numbers]

    def _count(self, number: int) -> None:
        # A worker that takes this one's place has one row less to try.
        if left := self.limits[number - 1]:
            self.limits[number - 1] = left - 1

    def _of(self, number: int) -> Report | Trouble:
        outcome, deaths = self._outcomes.get(number), self._deaths.get(number, [])
        if not deaths:
            assert outcome is not None
            return outcome
        sentences = [trouble.sentence for trouble in deaths]
        report = outcome if isinstance(outcome, Report) else None
        if isinstance(outcome, Trouble):
            sentences.append(outcome.sentence)
            report = outcome.report
        words = "; then ".join(sentences)
        return replace(deaths[-1], sentence=words, report=report, is_logged=True)
