"""Another process that shares the file of the failed rows, as another worker of a command does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcl_processor.execution import failed_elsewhere
from dcl_processor.execution.failed_elsewhere import (
    KEYS,
    ROWS,
    Elsewhere,
    FailedElsewhere,
    SharedFile,
)

CHECKOUT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from pathlib import Path
from dcl_processor.execution.failed_elsewhere import KEYS, ROWS, SharedFile
for line in sys.stdin:
    path, kind, digest = line.split()
    file = SharedFile(Path(path), KEYS if kind == "key" else ROWS)
    file.count_failure() if kind == "count" else file.add(bytes.fromhex(digest))
    file.close()
    print("done", flush=True)
"""


@contextmanager
def other_process() -> Iterator[subprocess.Popen[str]]:
    """Start the process, which serves several tests."""
    command = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=CHECKOUT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@dataclass(frozen=True)
class OtherWorker:
    """The other worker of a command with two, and the file that both share."""

    process: subprocess.Popen[str]
    path: Path
    label: str

    def failed(self, pk: Any) -> None:
        """Add a row that has failed there."""
        with self.file() as file:
            found = FailedElsewhere(file, self.label, "default", is_one_run=True)
            self._tell("row", found.digest(pk).hex())

    def called(self, key: Any) -> None:
        """Add a key for which ``process_batch()`` was called there."""
        with self.file(KEYS) as file:
            found = Elsewhere(file, self.label, "default", is_one_run=True)
            self._tell("key", found.digest(key).hex())

    def counted_failure(self) -> None:
        """Count a failure there."""
        self._tell("count", "-")

    @contextmanager
    def file(self, part: int = ROWS) -> Iterator[SharedFile]:
        file = SharedFile(self.path, part)
        try:
            yield file
        finally:
            file.close()

    def _tell(self, kind: str, digest: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{self.path} {kind} {digest}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def beside(
    process: subprocess.Popen[str], label: str, *, is_one_run: bool = True
) -> Iterator[OtherWorker]:
    """Make this process one of the two workers in the block."""
    with failed_elsewhere.shared() as path:
        assert path is not None
        with failed_elsewhere.joined(path, [label], is_one_run=is_one_run):
            yield OtherWorker(process, path, label)
    assert not path.exists()
