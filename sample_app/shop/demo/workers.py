"""Workers of a processor: real processes on this machine, all started at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sample_app

MANAGE_PY = Path(sample_app.__file__).with_name("manage.py")
POLL_SECONDS = 0.05
STOP_SECONDS = 10

Watch = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's share of the work, by its own report."""

    worker: int
    processed: int
    failed: int
    lease_lost: int
    seconds: float
    exit_code: int
    complaint: str

    @property
    def killed(self) -> bool:
        """True if SIGKILL ended the worker."""
        return self.exit_code == -signal.SIGKILL

    @property
    def came_to_the_end(self) -> bool:
        """True if the worker was not killed, and reported no errors other than failed rows."""
        # Rows that are tried again do not make the command fail; rows given up on do.
        return self.exit_code in ({0, 1} if self.failed else {0})


def run_workers(
    processor: str,
    workers: int,
    *,
    options: Sequence[str] = (),
    watch: Watch = lambda pids: None,  # noqa: ARG005 - by default there is no watcher
    environment: Mapping[str, str] | None = None,
) -> list[Share]:
    """Run the processor in ``workers`` processes until all have ended.

    Calls ``watch`` with their process ids meanwhile. ``environment`` adds to this process's own.
    """
    command = [sys.executable, str(MANAGE_PY), "processors", "run", processor, "--json", *options]
    variables = {**os.environ, "DEBUG": "no", **(environment or {})}
    with ExitStack() as stack:
        running = [
            stack.enter_context(_worker(number, command, variables))
            for number in range(1, workers + 1)
        ]
        pids = [worker.process.pid for worker in running]
        while any(worker.process.poll() is None for worker in running):
            watch(pids)
            time.sleep(POLL_SECONDS)
        watch(pids)
        return [worker.share() for worker in running]


@dataclass(frozen=True, slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def share(self) -> Share:
        report = _report(_text(self.output))
        return Share(
            worker=self.number,
            processed=report.get("processed", 0),
            failed=report.get("failed", 0),
            lease_lost=report.get("lease_lost", 0),
            seconds=report.get("duration", 0.0),
            exit_code=self.process.returncode,
            complaint=_text(self.errors).strip(),
        )


@contextmanager
def _worker(number: int, command: Sequence[str], environment: dict[str, str]) -> Iterator[_Worker]:
    # Files, not pipes: they are read at the end only, and a full pipe would block the worker.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
        try:
            yield _Worker(number, process, output, errors)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _report(text: str) -> dict[str, Any]:
    # A worker that died has no report; its exit code and complaint show why.
    try:
        report = json.loads(text)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
