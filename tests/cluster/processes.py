"""Starts workers and beat as people do, and ends each by its own process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.databases import environment
from tests.environments import CHECKOUT
from tests.waiting import PATIENCE, until


@dataclass
class Started:
    """A process of Celery's, and what it logs."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def pool(self) -> list[int]:
        return sorted(child.pid for child in psutil.Process(self.pid).children())

    def kill(self) -> None:
        """End it with all its pool, at once: as a machine is lost."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def in_a_group(command: Sequence[str], log: Path, **how: Any) -> Iterator[Started]:
    """Start a command in a process group of its own; make sure that it ends."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            **how,
        )
    started = Started(process, log)
    try:
        yield started
    finally:
        # Politely first: the pool's connections would outlive it for a moment otherwise.
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        started.kill()


@contextmanager
def worker(
    folder: Path, name: str, *arguments: str, variables: Mapping[str, str], size: int = 2
) -> Iterator[Started]:
    """Start a worker with a pool of ``size`` processes, and wait until it takes tasks."""
    command = [sys.executable, "-m", "celery", "-A", "tests.cluster.app", "worker"]
    command += ["--pool=prefork", f"--concurrency={size}", f"--hostname={name}@test"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO"]
    inherited = environment(**{"DJANGO_SETTINGS_MODULE": "tests.cluster.settings", **variables})
    # Celery warns of root, and of more that is not ours to answer for.
    del inherited["PYTHONWARNINGS"]
    log = folder / f"{name}.log"
    with in_a_group([*command, *arguments], log, env=inherited, cwd=CHECKOUT) as started:
        until(lambda: _is_ready(started), f"worker {name}")
        yield started


def _is_ready(started: Started) -> bool:
    assert started.process.poll() is None, started.log.read_text()
    return " ready." in started.log.read_text()
