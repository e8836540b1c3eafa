"""Notes the rows in flight in small files, which outlive the process; a run handles those last.

A row that kills its process, by ``os._exit()``, a crash in C or too much memory, leaves no trace in
a transaction that is rolled back, and would be first again in every run. So each lane of a run
notes its rows, outside the database, before it calls the handler. A run that finds the note of a
dead process handles these rows after all others, so that they cost the others nothing. Supervisors
of queues keep such a list, too. Here it is only a hint, which a run can do without.

The kernel keeps each file locked with ``flock()`` for as long as its process lives, and keeps the
time of its last note. A note has its keys with a NUL between them, and ends with two. It is written
by one call and unbuffered, so that the kernel has it at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.db import connections

from dcl_processor import log_fields, worker
from dcl_processor import steady as time
from dcl_processor.errors import printable

# Windows has no fcntl: there a dead process looks like a live one.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None

#: Logs what no report contains. The command shows it, however logging is configured.
logger = logging.getLogger("dcl_processor.operations")

#: Seconds between two looks for dead processes, because other workers may die during this run.
LOOK_EVERY = 0.1

#: Rows of a process that the log line names.
MOST_NAMED = 10

#: The end of the name of a file whose note was reported.
REPORTED = ".reported"

#: Between two keys of a note, and at its end. JSON would take twice the time, for each row.
BETWEEN, END = "\0", "\0\0"


@dataclass(frozen=True, slots=True)
class Death:
    """The rows in flight in a process that died; ``since``: when they were noted."""

    path: Path
    since: float
    keys: tuple[str, ...]

    def __str__(self) -> str:
        rows = ", ".join(map(printable, self.keys[:MOST_NAMED]))
        rows += f" and {len(self.keys) - MOST_NAMED} more" if len(self.keys) > MOST_NAMED else ""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(" ", "seconds")
        pid = self.path.name.split("-")[1]
        several = "s" if len(self.keys) > 1 else ""
        return f"process {pid} died while it handled row{several} {rows} (since {since})"


class Notes:
    """The notes of one run, and those that dead processes have left of the same processor.

    Their rows are handled last, one by one. Those of processes that have died since the run began,
    or its command, are left to the next run: each further worker of this one might die of them.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        #: The alias of the rows; unless it is set, no note is written and none is found.
        self.using: str | None = None
        #: The keys in flight in dead processes, and when each was last noted by one.
        self.known: dict[str, float] = {}
        self.deaths: dict[Path, Death] = {}
        #: The files of this run.
        self.own: set[Path] = set()
        #: When to look for dead processes again, by the monotonic clock.
        self.look_at = 0.0
        self._since = worker.began or time.time()
        self._aside: dict[str, Any] = {}
        # The candidates that were searched last, and for how many keys.
        self._looked_through: tuple[Collection[Any], int] = (), 0

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

    def among(self, waiting: Collection[Any]) -> list[Any]:
        """Put aside, and return, those of the candidates that were in flight in a dead process."""
        now = time.monotonic()
        if now >= self.look_at:
            self.look_at = now + LOOK_EVERY
            self._look()
        before, keys = self._looked_through
        if not self.known or (before is waiting and keys == len(self.known)):
            return []
        self._looked_through = waiting, len(self.known)
        # Race: poison row. A row that killed a process may kill this one: the others come first.
        found = {str(pk): pk for pk in waiting if str(pk) in self.known}
        self._aside.update(found)
        return list(found.values())

    def _look(self) -> None:
        place = self.place()
        for path in [] if place is None else sorted(place.parent.glob(f"{place.name}-*")):
            if path in self.deaths:
                continue
            with suppress(OSError):  # its process lives, or another run has renamed it
                death = read_note(path)
                if death is None:
                    path.unlink()  # of a process that died between two rows
                    continue
                if path.suffix != REPORTED:
                    # Only one run can rename the file, and that run reports it.
                    path = path.rename(f"{path}{REPORTED}")  # noqa: PLW2901
                    self._report(death)
                self.deaths[path] = death
                for key in death.keys:
                    self.known[key] = max(death.since, self.known.get(key, 0.0))

    def _report(self, death: Death) -> None:
        what = "left to the next run" if death.since >= self._since else "handled last, one by one"
        words = "%s: %s; if still pending, these rows are %s"
        extra = log_fields.fields(self.label, row_count=len(death.keys))
        log_fields.log(logger, logging.ERROR, words, self.label, death, what, extra=extra)

    def in_turn(self) -> list[Any]:
        """Return the rows to handle last; those of the latest death come at the very last."""
        found = [key for key in self._aside if self.known[key] < self._since]
        return [self._aside[key] for key in sorted(found, key=self.known.__getitem__)]

    def left(self) -> list[Any]:
        """Return the rows that are left to the next run."""
        return [pk for key, pk in self._aside.items() if self.known[key] >= self._since]

    def last_death(self, pks: Collection[Any]) -> float:
        """Return when the last process that died with one of these rows has noted it."""
        return max(self.known[str(pk)] for pk in pks)

    def settle(self, locked: Collection[Any]) -> None:
        """Forget finished rows; keep locked ones, which may kill the workers that hold them."""
        self.drop({str(pk) for pk in locked}.isdisjoint)

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
        self._path = Path()

    def note(self, pks: Collection[Any]) -> None:
        """Note that all of these rows are in flight, and no others."""
        if self.notes.using is None:
            return
        keys = [*map(str, pks)]
        note = f"{BETWEEN.join(keys)}{END}".encode(errors="replace")
        try:
            os.pwrite(self._make() if self._file is None else self._file, note, 0)
        except OSError:
            self.notes.using = None
            self.close()
            return
        if self.notes.known:
            self.notes.drop({*keys}.issuperset)

    def forget(self) -> None:
        """Note that no row is in flight any more."""
        if self._file is not None:
            os.pwrite(self._file, END.encode(), 0)

    def close(self) -> None:
        """Remove the file."""
        file, self._file = self._file, None
        if file is not None:
            _unlink(self._path)
            os.close(file)

    def _make(self) -> int:
        place = self.notes.place()
        if place is None:
            raise OSError("no folder can be used for the notes")
        name = f"{place.name}-{os.getpid()}-{secrets.token_hex(4)}"
        # Not under its own name until it is locked: others would take its process for dead.
        self._path = place.with_name(f".{name}")
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._path = self._path.rename(place.with_name(name))
        self.notes.own.add(self._path)
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


def read_note(path: Path) -> Death | None:
    """Return what a dead process has noted, if anything; raise ``OSError`` if it lives."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        note, end, _ = file.read().decode(errors="replace").partition(END)
        since = os.fstat(file.fileno()).st_mtime
    return Death(path, since, tuple(note.split(BETWEEN))) if note and end else None


def _unlink(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
