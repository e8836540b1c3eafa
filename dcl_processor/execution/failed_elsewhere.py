"""Rows that failed in another worker of the same run, so that a run tries each row once.

A failed row stays pending, and no column shows the other workers that it has failed. The workers of
one command share a small file instead, which each of them maps into memory. A worker adds a row
before it ends its lock, claim or lease, and another worker looks after it has got the row. So the
row's lock orders the two, as it does for the second check. A row that succeeds costs one look at a
number in memory. A command with one worker has no file.

Workers of other commands and of other machines do not see the file.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Windows has no fcntl: there each worker tries the rows by itself.
fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None

#: Rows that the file has room for; a further one replaces the oldest.
MOST = 10_000

#: The numbers of rows that were added so far, and of those that count as failed.
_numbers = struct.Struct("<qq")

#: A row: the process that added it, and what recognises the row.
_row = struct.Struct("<q16s")

SIZE = _numbers.size + MOST * _row.size


class SharedFile:
    """The file as one process has mapped it; its threads share it."""

    def __init__(self, path: Path) -> None:
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
            added, failed = self._read()
            _row.pack_into(self._map, self._place(added), os.getpid(), digest)
            _numbers.pack_into(self._map, 0, added + 1, failed)

    def count_failure(self) -> None:
        """Count a row as failed."""
        with self._exclusive():
            added, failed = self._read()
            _numbers.pack_into(self._map, 0, added, failed + 1)

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

    def _read(self) -> tuple[int, int]:
        numbers: tuple[int, int] = _numbers.unpack_from(self._map)
        return numbers

    @staticmethod
    def _place(number: int) -> int:
        return _numbers.size + number % MOST * _row.size

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # The kernel ends the lock of a process that dies.
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class FailedElsewhere:
    """The rows of one processor that have failed in other workers, for one run of this worker.

    ``is_one_run``: the runs of all workers are one run, so that a row that failed before this
    worker began is not tried either. Otherwise each run is a new one.
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
        """Record that a row has failed, before other workers can claim it."""
        self._file.add(self._digest(pk))

    def among(self, pks: Collection[Any]) -> list[Any]:
        """Return those of the rows that have failed in another worker."""
        if self._file.added != self._seen:
            self._look()
        if not self._known:
            return []
        return [pk for pk in pks if self._digest(pk) in self._known]

    def count_failure(self) -> None:
        """Count a row that the report counts as failed, for all workers of one run."""
        if self._is_one_run:
            self._file.count_failure()

    @property
    def failed(self) -> int:
        """The number of failed rows of all workers of one run, this one included."""
        return self._file.failed if self._is_one_run else 0

    def _look(self) -> None:
        with self._lock:
            self._seen, found = self._file.of_others(self._seen)
            self._known.update(dict.fromkeys(found))
            for digest in [*self._known][: max(0, len(self._known) - MOST)]:
                del self._known[digest]

    def _digest(self, pk: Any) -> bytes:
        return blake2b(f"{self._prefix}{pk}".encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _Membership:
    """The file that this process shares with other workers, and the processors that it is for."""

    file: SharedFile
    names: Collection[str]
    is_one_run: bool


_joined: _Membership | None = None


@contextmanager
def shared() -> Iterator[Path | None]:
    """Make a file for the workers of one command; ``None`` where it cannot be made."""
    path = None
    if fcntl is not None:
        with suppress(OSError):
            file, name = tempfile.mkstemp(prefix="dcl_processor-failed-")
            path = Path(name)
            os.truncate(file, SIZE)
            os.close(file)
    try:
        yield path
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink()


@contextmanager
def joined(path: Path | None, names: Collection[str], *, is_one_run: bool) -> Iterator[None]:
    """Share the file at ``path`` in the runs of these processors in the block.

    ``is_one_run``: as in ``FailedElsewhere``.
    """
    global _joined  # noqa: PLW0603  # a process is one worker
    file = None
    if path is not None:
        with suppress(OSError, ValueError):
            file = SharedFile(path)
    if file is None:
        yield
        return
    _joined = _Membership(file, names, is_one_run)
    try:
        yield
    finally:
        _joined = None
        file.close()


def of_run(label: str, using: str) -> FailedElsewhere | None:
    """Return what a run of this processor shares with other workers, if anything."""
    member = _joined
    if member is None or label not in member.names:
        return None
    return FailedElsewhere(member.file, label, using, is_one_run=member.is_one_run)
