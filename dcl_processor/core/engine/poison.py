"""Notes of the rows at work, on this machine, by which a row that kills its process is found.

Each run has a file that names the rows whose handler it has called, and removes it at its end. The
file of a process that has died names the row that may have killed it: the next run handles such
rows last, one by one. Where the folder cannot be used, a run works without notes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dcl_processor.core.report.counters import log

#: Characters of a note; longer ones are left out.
LONGEST = 4_000


class Notes:
    """The notes of one run; ``suspects``: keys of rows that may kill their process, as text."""

    def __init__(self, label: str) -> None:
        self._label = label
        self.suspects: set[str] = set()
        self._file: Any = None
        try:
            user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
            self._folder = Path(tempfile.gettempdir()) / f"dcl_processor-{user}"
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if hasattr(os, "getuid") and self._folder.stat().st_uid != user:
                raise PermissionError  # somebody else has made it
            name = blake2b(label.encode(), digest_size=8).hexdigest()
            self._find(f"{name}-*.note")
            path = self._folder / f"{name}-{os.getpid()}-{id(self)}.note"
            self._file = path.open("w+b", buffering=0)
            self._path = path
        except OSError:
            self._file = None

    def _find(self, pattern: str) -> None:
        """Read and remove the files of processes that have died."""
        for path in self._folder.glob(pattern):
            if _is_alive(int(path.name.split("-")[1])):
                continue
            with contextlib.suppress(ValueError, OSError):
                self.suspects.update(json.loads(path.read_bytes().decode().strip("\0 ") or "[]"))
            path.unlink(missing_ok=True)
        if self.suspects:
            message = "%s: row %s was at work when its process died; it is handled last, and alone"
            log(logging.ERROR, message, self._label, ", ".join(sorted(self.suspects)))

    def note(self, pks: Sequence[Any]) -> None:
        """Note that the handler of these rows is about to be called; none: that it has ended."""
        if self._file is not None:
            text = json.dumps([str(pk) for pk in pks]).encode()
            self._file.seek(0)
            self._file.write(text.ljust(LONGEST if len(text) > 80 else 80))

    def close(self) -> None:
        """Remove the file: the run has ended."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
            self._file = None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
