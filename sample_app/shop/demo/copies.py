"""Copies of a processor: real processes on this machine, all started at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sample_app

MANAGE_PY = Path(sample_app.__file__).with_name("manage.py")
POLL_SECONDS = 0.05
STOP_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Share:
    """What one copy did of the work, by its own report."""

    copy: int
    sent: int
    failed: int
    seconds: float
    exit_code: int
    complaint: str


def run_copies(
    processor: str, copies: int, mail_url: str, *, watch: Callable[[], None]
) -> list[Share]:
    """Run the processor in so many processes until all have ended; call watch meanwhile."""
    command = [sys.executable, str(MANAGE_PY), "processors", "run", processor, "--json"]
    environment = {**os.environ, "EMAIL_URL": mail_url, "DEBUG": "no"}
    with ExitStack() as stack:
        running = [
            stack.enter_context(_copy(number, command, environment))
            for number in range(1, copies + 1)
        ]
        while any(copy.process.poll() is None for copy in running):
            watch()
            time.sleep(POLL_SECONDS)
        watch()
        return [copy.share() for copy in running]


@dataclass(frozen=True, slots=True)
class _Copy:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]

    def share(self) -> Share:
        report = _report(_text(self.output))
        return Share(
            copy=self.number,
            sent=report.get("processed", 0),
            failed=report.get("failed", 0),
            seconds=report.get("duration", 0.0),
            exit_code=self.process.returncode,
            complaint=_text(self.errors).strip(),
        )


@contextmanager
def _copy(number: int, command: Sequence[str], environment: dict[str, str]) -> Iterator[_Copy]:
    # Files, not pipes: nobody reads until the end, and a full pipe would stop the copy.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
        try:
            yield _Copy(number, process, output, errors)
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
    # A copy that died has no report; its exit code and complaint say why.
    try:
        report = json.loads(text)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
