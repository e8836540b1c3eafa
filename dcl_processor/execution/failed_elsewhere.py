"""What other workers of the same run have tried: rows that failed, and keys that had their call.

A failed row stays pending, and no column shows the other workers that it has failed. The workers of
one command share a small file instead, which each of them maps into memory. A worker adds a row
before it ends its lock, claim or lease, and another worker looks after it has got the row. So the
row's lock orders the two, as it does for the second check. A row that succeeds costs one look at a
number in memory. A command with one worker has no file.

With ``group_by`` and ``process_batch()`` the file also has the keys for which the handler was
called, so that a run calls it once for each key: rows of the key may be left, because
``batch_size`` left them out, another session had them locked, or they arrived later.

Workers of other commands and of other machines do not see the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.db import connections

from .disk_room import fill

# Windows has no fcntl: there workers do not share their failures.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None

#: Rows that the file has room for, and keys; a further one replaces the oldest.
MOST = 10_000

#: The numbers of rows that were added so far, and of those that count as failed.
_numbers = struct.Struct("<qq")

#: A row: the process that added it, and what recognises the row.
_row = struct.Struct("<q16s")

_PART = _numbers.size + MOST * _row.size

#: Where the two parts of the file begin: the rows, and the keys, each with numbers of its own.
ROWS, KEYS = 0, _PART

SIZE = 2 * _PART


class SharedFile:
    """One part of the file as one process has mapped it; its threads share it."""

    def __init__(self, path: Path, part: int = ROWS) -> None:
        self._part = part
        self._file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        self._map = mmap.mmap(self._file, SIZE)
        self._lock = threading.Lock()

    @property
    def added(self) -> int:
        """The number of rows that were added so far."""
        return self._read()[0]

    @property
    def failed(self) -> int:
        """The number of rows that count as failed."""
        return self._read()[1]

    def add(self, digest: bytes) -> None:
        """Add a row, in place of the oldest one if there is no room."""
        with self._exclusive():
            self._add(digest)

    def add_at_once(self, digests: Collection[bytes]) -> None:
        """Add rows, or raise ``OSError`` if another has the lock: its process may be stopped."""
        if not self._lock.acquire(blocking=False):
            raise BlockingIOError("another thread has the lock")
        try:
            with self._locked(fcntl.LOCK_NB):
                for digest in digests:
                    self._add(digest)
        finally:
            self._lock.release()

    def count_failure(self) -> None:
        """Count a row as failed."""
        with self._exclusive():
            added, failed = self._read()
            _numbers.pack_into(self._map, self._part, added, failed + 1)

    def of_others(self, since: int) -> tuple[int, list[bytes]]:
        """Return how many rows were added so far, and those that other processes added since."""
        with self._exclusive():
            added = self._read()[0]
            places = range(max(since, added - MOST), added)
            rows = [_row.unpack_from(self._map, self._place(number)) for number in places]
        return added, [digest for pid, digest in rows if pid != os.getpid()]

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
        os.close(self._file)

    def _add(self, digest: bytes) -> None:
        added, failed = self._read()
        _row.pack_into(self._map, self._place(added), os.getpid(), digest)
        _numbers.pack_into(self._map, self._part, added + 1, failed)

    def _read(self) -> tuple[int, int]:
        numbers: tuple[int, int] = _numbers.unpack_from(self._map, self._part)
        return numbers

    def _place(self, number: int) -> int:
        return self._part + _numbers.size + number % MOST * _row.size

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock, self._locked():
            yield

    @contextmanager
    def _locked(self, how: int = 0) -> Iterator[None]:
        # The kernel ends the lock of a process that dies.
        fcntl.flock(self._file, fcntl.LOCK_EX | how)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Elsewhere:
    """Rows or keys of one processor that other workers have added, for one run of this worker.

    ``is_one_run``: the runs of all workers are one run, so that what was added before this worker
    began counts as well. Otherwise each run is a new one.
    """

    def __init__(self, file: SharedFile, label: str, using: str, *, is_one_run: bool) -> None:
        self._file = file
        self._prefix = f"{label}\0{using}\0"
        self._is_one_run = is_one_run
        self._seen = 0 if is_one_run else file.added
        #: A dict because of its order: the oldest is dropped first, as in the file.
        self._known: dict[bytes, None] = {}
        self._lock = threading.Lock()

    def add(self, pk: Any) -> None:
        """Record a row or a key before other workers can claim it."""
        self._file.add(self.digest(pk))

    def among(self, pks: Collection[Any]) -> list[Any]:
        """Return those that another worker has added."""
        if self._file.added != self._seen:
            self._look()
        if not self._known:
            return []
        return [pk for pk in pks if self.digest(pk) in self._known]

    def _look(self) -> None:
        with self._lock:
            seen, found = self._file.of_others(self._seen)
            self._known.update(dict.fromkeys(found))
            # Last: other threads compare it without the lock, and rely on what is known then.
            self._seen = seen
            for digest in [*self._known][: max(0, len(self._known) - MOST)]:
                del self._known[digest]

    def digest(self, pk: Any) -> bytes:
        """Return the 16 bytes by which the file knows a row or a key."""
        return blake2b(f"{self._prefix}{pk}".encode(), digest_size=16).digest()


class FailedElsewhere(Elsewhere):
    """The rows of one processor that have failed in other workers."""

    def count_failure(self) -> None:
        """Count a row that the report counts as failed, for all workers of one run."""
        if self._is_one_run:
            self._file.count_failure()

    @property
    def failed(self) -> int:
        """The number of failed rows of all workers of one run, this one included."""
        return self._file.failed if self._is_one_run else 0


@dataclass(frozen=True, slots=True)
class _Membership:
    """The file that this process shares with other workers, and the processors that it is for."""

    file: SharedFile
    keys: SharedFile
    names: Collection[str]
    is_one_run: bool


_joined: _Membership | None = None


@contextmanager
def shared() -> Iterator[Path | None]:
    """Make a file for the workers of one command; ``None`` where it cannot be made."""
    path = None
    if fcntl is not None:
        with suppress(OSError):
            path = _made()
    try:
        yield path
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink()


def _made() -> Path:
    file, name = tempfile.mkstemp(prefix="dcl_processor-failed-")
    try:
        fill(file, bytes(SIZE))
    except OSError:
        Path(name).unlink()
        raise
    finally:
        os.close(file)
    return Path(name)


@contextmanager
def joined(path: Path | None, names: Collection[str], *, is_one_run: bool) -> Iterator[None]:
    """Share the file at ``path`` in the runs of these processors in the block.

    ``is_one_run``: as in ``FailedElsewhere``.
    """
    global _joined  # noqa: PLW0603  # a process is one worker
    with ExitStack() as files:
        rows = keys = None
        if path is not None:
            with suppress(OSError, ValueError):
                rows, keys = (SharedFile(path, part) for part in (ROWS, KEYS))
        if rows is None or keys is None:
            yield
            return
        files.callback(rows.close)
        files.callback(keys.close)
        _joined = _Membership(rows, keys, names, is_one_run)
        try:
            yield
        finally:
            _joined = None


def record_for_others(path: Path | None, label: str, keys: Collection[Any]) -> None:
    """Record the rows of a worker that is about to be killed, as it cannot do so itself."""
    if path is None:
        return
    with suppress(OSError, ValueError):
        file = SharedFile(path)
        try:
            _record(file, label, keys)
        finally:
            file.close()


def record_late(label: str, keys: Collection[Any]) -> bool:
    """Record rows of this worker whose time is over, as it may be killed for them at any moment.

    Never waits; returns ``False`` if the caller is to try again.
    """
    member = _joined
    if member is None or label not in member.names:
        return True
    try:
        _record(member.file, label, keys)
    except OSError:
        return False
    except ValueError:  # a key that cannot be written, or a file that was closed meanwhile
        return True
    return True


def _record(file: SharedFile, label: str, keys: Collection[Any]) -> None:
    # The callers do not know the database of the run, so the rows count as failed on each.
    for alias in connections:
        run = FailedElsewhere(file, label, alias, is_one_run=True)
        file.add_at_once([run.digest(key) for key in keys])


def is_shared(label: str) -> bool:
    """Return whether a run of this processor shares anything with other workers."""
    return _joined is not None and label in _joined.names


def of_run(label: str, using: str) -> FailedElsewhere | None:
    """Return what a run of this processor shares with other workers, if anything."""
    member = _joined
    if member is None or label not in member.names:
        return None
    return FailedElsewhere(member.file, label, using, is_one_run=member.is_one_run)


def called_of_run(label: str, using: str) -> Elsewhere | None:
    """Return the keys that a run of this processor shares with other workers, if anything."""
    member = _joined
    if member is None or label not in member.names:
        return None
    return Elsewhere(member.keys, label, using, is_one_run=member.is_one_run)
