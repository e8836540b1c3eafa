"""What a worker tells its parent through a pipe, and what is reported of it."""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

from dcl_processor.execution.calls import Call
from dcl_processor.operator.diagnosis import ErrorInWorker, Trouble, describe
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import printable, represent
from dcl_processor.report.report import Report
from dcl_processor.watch.watch import Event

#: Rows that are named, and the characters of a key.
MOST_ROWS, LONGEST = 5, 100


@dataclass(frozen=True, slots=True)
class AtWork:
    """A call of a handler; ``number``: of its rows, of which ``keys`` has the first, as text.

    ``since``: its beginning, by the monotonic clock, which processes share. ``limit``: its
    ``handler_timeout`` in seconds, if it has one.
    """

    label: str
    keys: tuple[str, ...]
    number: int
    since: float
    limit: float | None

    @classmethod
    def of(cls, call: Call) -> AtWork:
        """Return what is to be known of a call in another process."""
        keys = tuple(_text(key)[:LONGEST] for key in call.keys[:MOST_ROWS])
        return cls(call.label, keys, len(call.keys), call.since, call.limit)

    def __str__(self) -> str:
        return f"{self.named} since {clock(self.since)}"

    @property
    def named(self) -> str:
        """The rows in words, such as ``"row 17"``."""
        rows = self.rows
        more = f" and {self.number - len(rows)} more" if self.number > len(rows) else ""
        return f"row{'s' * (self.number > 1)} {', '.join(rows)}{more}"

    @property
    def rows(self) -> list[str]:
        """The first of its keys, without control characters."""
        return [printable(key) for key in self.keys]


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; ``call``: the oldest call that is late, or else the oldest one.

    ``is_overdue``: it has not ended although it was interrupted.
    """

    call: AtWork | None
    is_overdue: bool = False


def clock(moment: float) -> str:
    """Return a moment of the monotonic clock as a time of day; with its day unless it is today."""
    now = datetime.now(UTC)
    at = datetime.fromtimestamp(now.timestamp() - (time.monotonic() - moment), UTC)
    return f"{at:%H:%M:%S} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _text(key: Any) -> str:
    try:
        return str(key)
    except Exception:  # noqa: BLE001  # a key's own __str__() is arbitrary code
        return "?"


# --- what the supervisor reports


@dataclass(frozen=True, slots=True)
class Died:
    """A worker has died, or did not start.

    ``wait``: seconds until its restart, ``None`` without one. ``call``: the rows that it was at,
    by its last beat.
    """

    trouble: Trouble
    wait: float | None
    call: AtWork | None = None

    def __str__(self) -> str:
        at = ""
        if self.call is not None:
            at = f", last seen at {self.call}{f' of {self.call.label}' * bool(self.call.label)}"
        match self.wait:
            case None:
                again = ""
            case 0:
                again = "; it is started again"
            case wait:
                again = f"; it is started again in {wait:.1f} s"
        return f"{self.trouble.sentence}{at}{again}"


News = Event | Died

#: Takes a worker's number, a processor's name (``None``: the worker itself), and what happened.
Tell = Callable[[int, str | None, News], None]


# --- the state of each worker of a command, as it is shown outside


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker now; ``pid``: of its process, if there is one; ``state``: in words.

    ``call``: what it was at when it last sent a beat. ``is_alive``: whether it has moved lately,
    and is in no handler that should have ended.
    """

    number: int
    pid: int | None
    state: str
    call: AtWork | None
    is_alive: bool


#: Takes the workers of this command that have not ended.
Observe = Callable[[Sequence[Worker]], None]


# --- the pipe


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
