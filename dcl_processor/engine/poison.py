"""Notes of the rows at work, on this machine, by which a row that kills its process is found.

Each run of TRANSACTIONAL has a file that names the rows whose handler it has called, and holds its
lock. A file without one is of a process that has died: it names the row that may have killed it.
The next run handles such rows last, one by one. Where the folder cannot be used, and for the other
deliveries, a run works without notes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import uuid
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dcl_processor.report.errors import printable

#: Shown by the command in any case.
operations = logging.getLogger("dcl_processor.operations")

#: Bytes of a note; a shorter one is padded, so that it needs no truncation.
WIDTH = 80

#: Between two keys, and the padding: no database has it in a key.
END = "\0"


class Notes:
    """The notes of one run; ``suspects``: keys of rows that may kill their process, as text."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.suspects: set[str] = set()
        self._file: Any = None

    def begin(self) -> None:
        """Begin to take notes, with the rows that those of dead processes name as suspects."""
        with contextlib.suppress(OSError, ImportError):
            import fcntl  # not on Windows, where a run works without notes

            flock: Any = fcntl.flock
            self._lock: Any = lambda file: flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = Path(tempfile.gettempdir()) / f"dcl_processor-{os.getuid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                self._open(folder, blake2b(self._label.encode(), digest_size=8).hexdigest())

    def _open(self, folder: Path, name: str) -> None:
        """Take over the notes of processes that have died, and begin one."""
        for path in folder.glob(f"{name}-*.note"):
            with contextlib.suppress(ValueError, OSError), path.open("rb") as file:
                self._lock(file)  # or its process lives
                self.suspects.update(filter(None, file.read().decode().split(END)))
                path.unlink(missing_ok=True)
        if self.suspects:
            message = "%s: row %s was at work when its process died; it is handled last, and alone"
            operations.error(message, self._label, printable(", ".join(sorted(self.suspects))))
        self._path = folder / f"{name}-{uuid.uuid4().hex}.note"
        self._file = self._path.open("xb", buffering=0)
        self._lock(self._file)
        self.note([])

    def note(self, pks: Sequence[Any]) -> None:
        """Note that the handler of these rows is about to be called; none: that it has ended."""
        if self._file is None:
            return
        at_work = [str(pk) for pk in pks]
        self.suspects.difference_update(at_work)
        text = END.join([*at_work, *self.suspects]).encode()
        os.pwrite(self._file.fileno(), text.ljust(WIDTH, END.encode()), 0)
        if len(text) > WIDTH or self.suspects:
            self._file.truncate(max(len(text), WIDTH))

    def close(self) -> None:
        """Remove the file: the run has ended; unless it has not come to its suspects."""
        file, self._file = self._file, None
        if file is not None:
            if not self.suspects:
                self._path.unlink(missing_ok=True)
            file.close()
