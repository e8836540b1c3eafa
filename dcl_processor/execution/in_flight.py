"""Notes the row at hand (in flight) in a small file, which outlives the process.

A row that kills its process, by ``os._exit()``, a crash in C or too much memory, leaves no trace in
a transaction that is rolled back, and would be first again in every run. So each thread of a run
notes the row, outside the database, before it calls the handler. A run that finds the note of a
dead process knows which row to handle last, so that this row costs the others nothing. Supervisors
of queues keep such a list, too. Here it is only a hint, which a run can do without.

The kernel keeps each file locked with ``flock()`` for as long as its process lives.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.db import connections

from dcl_processor import steady as time
from dcl_processor.errors import printable

# Windows has no fcntl: there a dead process looks like a live one.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None

#: What a note begins with: the place of the row in flight among its rows, or one of these; then
#: whether its process was killed for them.
_NONE, _ALL, _WIDTH, _KILLED = -1, -2, 8, b"!"

#: Seconds for which a file without a note may be one that its process is still creating.
YOUNG = 60.0

#: What is raised for the content of another file, or of one that is being written.
_UNREADABLE = (ValueError, TypeError, IndexError)

#: Rows of a process that the log line names.
MOST_NAMED = 10

#: When the command began whose worker this process is, in seconds since 1970.
command_began: float | None = None

#: Added to the name of a file whose note was reported.
REPORTED = ".reported"


@contextmanager
def worker_of(began: float) -> Iterator[None]:
    """Let this process be a worker of a command that began then, in the block."""
    global command_began  # noqa: PLW0603  # a process is one worker
    command_began = began
    try:
        yield
    finally:
        command_began = None


@dataclass(frozen=True, slots=True)
class Death:
    """The rows in flight in a process that died; ``number``: how many processes died with them.

    ``is_for_rows``: it was killed because a handler did not return.
    """

    path: Path
    pid: int
    since: float
    number: int
    keys: tuple[str, ...]
    is_for_rows: bool = False

    def __str__(self) -> str:
        rows = ", ".join(map(printable, self.keys[:MOST_NAMED]))
        rows += f" and {len(self.keys) - MOST_NAMED} more" if len(self.keys) > MOST_NAMED else ""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(" ", "seconds")
        deaths = f"; {self.number} processes so far" if self.number > 1 else ""
        return (
            f"process {self.pid} died while it handled row{'s' * (len(self.keys) > 1)} {rows} "
            f"(since {since}{deaths})"
        )


@dataclass
class Notes:
    """The notes of one processor on one database, including those of other runs.

    ``using``: unless it is set, no note is written and none is found. ``known``: the keys in flight
    in processes that died, and how many processes died with each; ``killed_for``: since when a row
    was in flight in the last process that was killed for it.
    """

    label: str
    using: str | None = None
    known: dict[str, int] = field(default_factory=dict)
    killed_for: dict[str, float] = field(default_factory=dict)
    deaths: dict[Path, Death] = field(default_factory=dict)
    #: The files of all threads of this run.
    own: set[Path] = field(default_factory=set)

    def place(self) -> Path | None:
        """Return the folder and the start of the files' names, if there is a safe place."""
        identity = None if self.using is None or fcntl is None else _identity(self.using)
        folder = None if identity is None else _folder()
        if folder is None:
            return None
        digest = hashlib.sha256(repr((self.label, identity)).encode()).hexdigest()[:16]
        return folder / digest

    def look(self) -> list[Death]:
        """Look for processes that have died; return those that no run has reported yet."""
        place = self.place()
        if place is None:
            return []
        news = []
        for path in sorted(place.parent.glob(f"{place.name}-*")):
            if path in self.deaths or path in self.own:
                continue
            with suppress(OSError):
                death = _died(path)
                if death is not None and path.suffix != REPORTED:
                    # Only one run can rename the file, and that run reports it.
                    path = path.rename(f"{path}{REPORTED}")  # noqa: PLW2901
                    news.append(death)
                if death is not None:
                    self._remember(path, death)
        return news

    def _remember(self, path: Path, death: Death) -> None:
        self.deaths[path] = death
        for key in death.keys:
            self.known[key] = max(death.number, self.known.get(key, 0))
            if death.is_for_rows:
                self.killed_for[key] = max(death.since, self.killed_for.get(key, 0.0))

    def replace(self, keys: Collection[str]) -> None:
        """Drop the notes whose keys are all in the note that was just written."""
        for path, death in list(self.deaths.items()):
            if set(death.keys) <= set(keys):
                _drop(path)
                del self.deaths[path]

    def close(self) -> None:
        """Remove the remaining files, of threads that an interrupt has left at work."""
        for path in list(self.own):
            self.drop(path)

    def drop(self, path: Path) -> None:
        """Remove a file of this run."""
        _drop(path)
        self.own.discard(path)

    def settle(self, open_keys: Collection[str]) -> None:
        """Drop the notes of finished rows, and keep those that contain one of these keys."""
        for path, death in list(self.deaths.items()):
            if not set(death.keys) & set(open_keys):
                _drop(path)
                del self.deaths[path]


class InFlight:
    """One lane's note; each lane of a run has its own.

    A note is a number, followed by the rows of a batch. The number is the place of the row in
    flight, or stands for all of the rows, or for none. Nothing is buffered, so that the kernel has
    each write at once: it outlives the process.
    """

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self._file: int | None = None
        self._path: Path | None = None
        self._is_useless = False

    def note(self, pks: Collection[Any]) -> None:
        """Note that all of these rows are in flight."""
        if self.notes.using is None or self._is_useless:
            return
        keys, known = [str(pk) for pk in pks], self.notes.known
        number = 1 + max((known.get(key, 0) for key in keys), default=0) if known else 1
        note = f"{_ALL:{_WIDTH}} {json.dumps([time.time(), number, keys])}\n"
        try:
            os.pwrite(self._make() if self._file is None else self._file, note.encode(), 0)
        except OSError:
            self._is_useless = True
            self.close()
            return
        if number > 1:
            self.notes.replace(keys)

    def narrow(self, index: int) -> None:
        """Note that only the row at this place of the batch, counted from 0, is in flight."""
        if self._file is not None:
            os.pwrite(self._file, b"%*d" % (_WIDTH, index), 0)

    def forget(self) -> None:
        """Note that no row is in flight any more."""
        if self._file is not None:
            os.pwrite(self._file, b"%*d" % (_WIDTH, _NONE), 0)

    def close(self) -> None:
        """Remove this thread's file."""
        file, self._file = self._file, None
        if file is not None and self._path is not None:
            self.notes.drop(self._path)
            os.close(file)

    def _make(self) -> int:
        place = self.notes.place()
        if place is None:
            raise OSError("no folder can be used for the notes")
        self._path = place.with_name(f"{place.name}-{os.getpid()}-{secrets.token_hex(4)}")
        self.notes.own.add(self._path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._file


def _folder() -> Path | None:
    """Return a folder that is this user's alone, created if needed, or ``None``."""
    if not hasattr(os, "getuid"):
        return None
    folder = Path(tempfile.gettempdir()) / f"dcl_processor-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    # In a shared folder, any user may create a folder of this name, or a link to another place.
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if ours and not found.st_mode & 0o077 else None


def _identity(using: str) -> tuple[str, ...] | None:
    """Return what identifies the database, or ``None`` for one in this process's memory."""
    connection: Any = connections[using]
    settings = connection.settings_dict
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        return None
    return (connection.vendor, *(str(settings[name]) for name in ("NAME", "HOST", "PORT")))


def _died(path: Path) -> Death | None:
    """Return the rows in flight in a file's process, if that process has died."""
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        death = None
        with suppress(*_UNREADABLE):
            death = _read(path, file)
        if death is None and time.time() - os.fstat(file).st_mtime > YOUNG:
            _drop(path)  # of a process that died between two rows
        return death


def _read(path: Path, file: int) -> Death | None:
    content = os.pread(file, os.fstat(file).st_size, 0)
    head, note = content[:_WIDTH], content[_WIDTH + 1 :].partition(b"\n")[0]
    if (place := int(head)) == _NONE:
        return None
    since, number, keys = json.loads(note)
    named = tuple(map(str, keys if place == _ALL else [keys[place]]))
    is_for_rows = content[_WIDTH : _WIDTH + 1] == _KILLED
    pid = int(path.name.split("-")[1])
    return Death(path, pid, float(since), int(number), named, is_for_rows)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


def rows_of(pid: int) -> list[Death]:
    """Return the notes of a process that is still there, one for each of its threads."""
    folder, found = _folder(), []
    if folder is not None:
        for path in sorted(folder.glob(f"*-{pid}-*")):
            # Its process may write it meanwhile, and then it is of no use.
            with suppress(OSError, *_UNREADABLE), _opened(path) as file:
                found.append(_read(path, file))
    return [note for note in found if note is not None]


def note_killed(pid: int) -> None:
    """Note that a process is about to be killed for its rows, as it cannot do so itself."""
    folder = _folder()
    for path in [] if folder is None else sorted(folder.glob(f"*-{pid}-*")):
        with suppress(OSError):
            file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(file, _KILLED, _WIDTH)
            finally:
                os.close(file)


def _drop(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
