"""The messages of a child to its parent, which pass a pipe."""

from __future__ import annotations

import os
import pickle
import struct
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from dcl_processor.diagnosis import ErrorInWorker, Trouble, describe
from dcl_processor.errors import represent
from dcl_processor.report import Report

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


class Outbox:
    """The child's end; ``stop`` is set when the parent has gone."""

    def __init__(self, pipe: Connection, stop: threading.Event) -> None:
        self._pipe = pipe
        self._stop = stop
        self._lock = threading.Lock()

    def send(self, name: str | None, event: Any) -> None:
        """Send an event of a processor, or, without a name, of the child itself."""
        pickled = pickle.dumps((name, _picklable(event)))
        left = memoryview(_length.pack(len(pickled)) + pickled)
        with self._lock:
            try:
                while left:
                    left = left[os.write(self._pipe.fileno(), left) :]
            except OSError:
                self._stop.set()  # no process reads the messages


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
