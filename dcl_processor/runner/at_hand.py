"""Which row is at hand, noted where it outlives the process: in a small file beside the database.

A row that kills its process, by ``os._exit()``, a crash in C or too much memory, leaves no trace in
a transaction that is rolled back, and would be first again in every run. So each thread of a run
notes the row before it calls the handler. Who finds a note without its process knows which row to
handle last, so that it costs the others nothing. Supervisors of queues keep such a list, too; here
it is a hint only, and a run without it does what it did before.

A file is locked with ``flock()`` for as long as its process lives, which the kernel sees to.
"""

from __future__ import annotations

import ast
import hashlib
import mmap
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.db import connections

from dcl_processor.errors import printable

# Windows has none: there a process that died looks like one that lives.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None

#: Bytes of a file, and of the number that it begins with.
SIZE, FIRST = 16_384, 8

_at = struct.Struct("<q")
_NONE, _ALL = -1, -2

#: Seconds for which a file without a note may be one that is being made.
YOUNG = 60.0

#: Rows that are named of one process.
MOST_NAMED = 10

#: Added to the name of a file whose note was reported.
REPORTED = ".reported"


@dataclass(frozen=True, slots=True)
class Death:
    """What a process had at hand when it died; ``number``: as how many processes before it."""

    path: Path
    pid: int
    since: float
    number: int
    keys: tuple[str, ...]

    def __str__(self) -> str:
        rows = ", ".join(map(printable, self.keys[:MOST_NAMED]))
        rows += f" and {len(self.keys) - MOST_NAMED} more" if len(self.keys) > MOST_NAMED else ""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(" ", "seconds")
        before = f", as {self.number - 1} did before it" if self.number > 1 else ""
        return (
            f"process {self.pid} died with row{'s' * (len(self.keys) > 1)} {rows} at hand "
            f"(since {since}{before})"
        )


@dataclass
class Notes:
    """The notes of one processor on one database, those of other runs included.

    ``using``: unless that is set, nothing is noted and nothing found. ``known``: keys at hand of
    processes that died, and how many did.
    """

    label: str
    using: str | None = None
    known: dict[str, int] = field(default_factory=dict)
    deaths: dict[Path, Death] = field(default_factory=dict)
    #: Files of this run, of all its threads.
    own: set[Path] = field(default_factory=set)

    def place(self) -> Path | None:
        """Return the folder and the beginning of the files' names, if there is a safe place."""
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

    def replace(self, keys: Collection[str]) -> None:
        """Drop the notes that say no more than one that was just written."""
        for path, death in list(self.deaths.items()):
            if set(death.keys) <= set(keys):
                _drop(path)
                del self.deaths[path]

    def close(self) -> None:
        """Remove the files that are left, of threads that an interrupt has left at work."""
        for path in list(self.own):
            self.drop(path)

    def drop(self, path: Path) -> None:
        """Remove a file of this run."""
        _drop(path)
        self.own.discard(path)

    def settle(self, open_keys: Collection[str]) -> None:
        """Drop the notes of rows that are over, and keep those that name one of these keys."""
        for path, death in list(self.deaths.items()):
            if not set(death.keys) & set(open_keys):
                _drop(path)
                del self.deaths[path]


class AtHand(threading.local):
    """One thread's note; each thread that handles rows of a run has its own.

    A note names the rows of a batch, behind a number: the place of the one that is at hand, or what
    stands for all of them, or for none. The file is mapped into memory: what is stored there is the
    kernel's at once, and outlives the process, for less than a system call costs.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._map: mmap.mmap | None = None
        self._file = -1
        self._path: Path | None = None
        self._is_useless = False
        self._named = 0

    def note(self, pks: Collection[Any]) -> None:
        """Note that these rows are at hand, all of them."""
        if self._notes.using is None or self._is_useless:
            return
        try:
            at = self._map or self._make()
        except OSError:
            self._is_useless = True
            return
        keys = [str(pk) for pk in pks]
        known = self._notes.known
        number = 1 + max((known.get(key, 0) for key in keys), default=0) if known else 1
        note = f"{time.time()} {number} {keys!a}\n".encode()
        while len(note) > SIZE - FIRST:
            keys = keys[: len(keys) // 2]
            note = f"{time.time()} {number} {keys!a}\n".encode()
        self._named = len(keys)
        _at.pack_into(at, 0, _NONE)
        at[FIRST : FIRST + len(note)] = note
        _at.pack_into(at, 0, _ALL)
        if number > 1:
            self._notes.replace(keys)

    def narrow(self, index: int, pk: Any) -> None:
        """Note that of those rows the one in this place is at hand, from 0."""
        at = self._map
        if at is not None:
            if index < self._named:
                _at.pack_into(at, 0, index)
            else:  # one that had no room
                self.note([pk])

    def forget(self) -> None:
        """Note that no row is at hand any more."""
        if self._map is not None:
            _at.pack_into(self._map, 0, _NONE)

    def close(self) -> None:
        """Remove this thread's file."""
        at, self._map = self._map, None
        if at is not None and self._path is not None:
            self._notes.drop(self._path)
            at.close()
            os.close(self._file)

    def _make(self) -> mmap.mmap:
        place = self._notes.place()
        if place is None:
            raise OSError("there is no place for notes")
        self._path = place.with_name(f"{place.name}-{os.getpid()}-{secrets.token_hex(4)}")
        self._notes.own.add(self._path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Written and not only made so long: a full disk says so here, and not as SIGBUS later.
        os.write(self._file, _at.pack(_NONE) + b" " * (SIZE - FIRST))
        self._map = mmap.mmap(self._file, SIZE)
        return self._map


def _folder() -> Path | None:
    """Return a folder of this user's alone, made if need be, or ``None`` where there is none."""
    if not hasattr(os, "getuid"):
        return None
    folder = Path(tempfile.gettempdir()) / f"dcl_processor-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    # Anybody may make a folder of this name in a shared one, or a link to somewhere else.
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if ours and not found.st_mode & 0o077 else None


def _identity(using: str) -> tuple[str, ...] | None:
    """Return what tells one database from another, or ``None`` for one of this process."""
    connection: Any = connections[using]
    settings = connection.settings_dict
    if connection.vendor == "sqlite" and connection.is_in_memory_db():
        return None
    return (connection.vendor, *(str(settings[name]) for name in ("NAME", "HOST", "PORT")))


def _died(path: Path) -> Death | None:
    """Return what a file's process had at hand, if that has died."""
    with _opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        try:
            death = _read(path, os.pread(file, SIZE, 0))
        except (ValueError, SyntaxError, IndexError, TypeError, struct.error):
            death = None
        if death is None and time.time() - os.fstat(file).st_mtime > YOUNG:
            _drop(path)  # of a process that died between two rows
        return death


def _read(path: Path, content: bytes) -> Death | None:
    (place,) = _at.unpack_from(content)
    if place == _NONE:
        return None
    since, number, keys = content[FIRST:].partition(b"\n")[0].decode().split(" ", 2)
    named = tuple(ast.literal_eval(keys))
    at_hand = named if place == _ALL else (named[place],)
    return Death(path, int(path.name.split("-")[1]), float(since), int(number), at_hand)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


def _drop(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
