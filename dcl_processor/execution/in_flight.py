"""Notes the row at hand (in flight) in a small file, which outlives the process.

A row that kills its process, by ``os._exit()``, a crash in C or too much memory, leaves no trace in
a transaction that is rolled back, and would be first again in every run. So each lane of a run
notes the row, outside the database, before it calls the handler. A run that finds the note of a
dead process knows which row to handle last, so that this row costs the others nothing. Supervisors
of queues keep such a list, too. Here it is only a hint, which a run can do without.

The kernel keeps each file locked with ``flock()`` for as long as its process lives. A note is the
file's first line; without one, no row is in flight. It is written by one call and unbuffered, so
that the kernel has it at once. A suffix of the file's name shows what other processes know of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
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

#: Seconds for which a file without a note may be one that its process is still creating.
YOUNG = 60.0

#: Rows of a process that the log line names.
MOST_NAMED = 10

#: Of a file whose process was killed for its rows, and of one whose note was reported.
KILLED, REPORTED = ".killed", ".reported"


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
    in processes that died, and how many processes died with each. ``own``: the files of this run.
    """

    label: str
    using: str | None = None
    known: dict[str, int] = field(default_factory=dict)
    deaths: dict[Path, Death] = field(default_factory=dict)
    own: set[Path] = field(default_factory=set)

    def place(self) -> Path | None:
        """Return the folder and the start of the files' names, if there is a safe place."""
        connection: Any = None if self.using is None else connections[self.using]
        if connection is None or fcntl is None or (folder := _folder()) is None:
            return None
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            return None
        names = (str(connection.settings_dict[name]) for name in ("NAME", "HOST", "PORT"))
        identity = repr((self.label, (connection.vendor, *names)))
        return folder / hashlib.sha256(identity.encode()).hexdigest()[:16]

    def look(self) -> list[Death]:
        """Look for processes that have died; return those that no run has reported yet."""
        place, news = self.place(), []
        for path in [] if place is None else sorted(place.parent.glob(f"{place.name}-*")):
            if path in self.deaths or path in self.own:
                continue
            with suppress(OSError):
                death = read_note(path)
                if death is None:
                    if time.time() - path.stat().st_mtime > YOUNG:
                        path.unlink()  # of a process that died between two rows
                    continue
                if path.suffix != REPORTED:
                    # Only one run can rename the file, and that run reports it.
                    path = path.rename(f"{path}{REPORTED}")  # noqa: PLW2901
                    news.append(death)
                self.deaths[path] = death
                for key in death.keys:
                    self.known[key] = max(death.number, self.known.get(key, 0))
        return news

    def drop(self, is_over: Callable[[set[str]], bool]) -> None:
        """Drop the notes of dead processes for whose keys the function returns true."""
        for path, death in list(self.deaths.items()):
            if is_over({*death.keys}):
                _unlink(path)
                del self.deaths[path]

    def close(self) -> None:
        """Remove the remaining files, of threads that an interrupt has left at work."""
        for path in self.own:
            _unlink(path)


class InFlight:
    """The note of one lane of a run."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self._file: int | None = None
        self._path: Path | None = None
        self._is_useless = False

    def note(self, pks: Collection[Any]) -> None:
        """Note that all of these rows are in flight, and no others."""
        if self.notes.using is None or self._is_useless:
            return
        keys, known = [str(pk) for pk in pks], self.notes.known
        number = 1 + max((known.get(key, 0) for key in keys), default=0) if known else 1
        note = f"{json.dumps([time.time(), number, keys])}\n"
        try:
            os.pwrite(self._make() if self._file is None else self._file, note.encode(), 0)
        except OSError:
            self._is_useless = True
            self.close()
            return
        if number > 1:
            self.notes.drop({*keys}.issuperset)

    def forget(self) -> None:
        """Note that no row is in flight any more."""
        if self._file is not None:
            os.pwrite(self._file, b"\n", 0)

    def close(self) -> None:
        """Remove the file."""
        file, self._file = self._file, None
        if file is not None and self._path is not None:
            _unlink(self._path)
            self.notes.own.discard(self._path)
            os.close(file)

    def _make(self) -> int:
        place = self.notes.place()
        if place is None:
            raise OSError("no folder can be used for the notes")
        self._path = place.with_name(f"{place.name}-{os.getpid()}-{secrets.token_hex(4)}")
        self.notes.own.add(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
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


def read_note(path: Path, *, of_dead: bool = True) -> Death | None:
    """Return what is noted in a file, if anything is.

    Raises ``OSError`` if the process lives and has to be ``of_dead``.
    """
    with path.open("rb") as file:
        if of_dead:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # It may be another file, or its process may be writing it.
        with suppress(ValueError, TypeError, IndexError):
            since, number, keys = json.loads(file.readline())
            pid, is_for_rows = int(path.name.split("-")[1]), KILLED in path.suffixes
            return Death(path, pid, float(since), int(number), tuple(map(str, keys)), is_for_rows)
    return None


def rows_of(pid: int) -> list[Death]:
    """Return the notes of a process that is still there, one for each of its lanes."""
    found = []
    for path in _files(pid):
        with suppress(OSError):
            found.append(read_note(path, of_dead=False))
    return [note for note in found if note is not None]


def note_killed(pid: int) -> None:
    """Note that a process is about to be killed for its rows, as it cannot do so itself."""
    for path in _files(pid):
        with suppress(OSError):
            path.rename(f"{path}{KILLED}")


def _files(pid: int) -> list[Path]:
    folder = _folder()
    return [] if folder is None else sorted(folder.glob(f"*-{pid}-*"))


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
