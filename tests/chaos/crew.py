"""The workers: a watcher with copies on each route, and what a service manager does for them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.waiting import PATIENCE

from .routes import Routes

CHECKOUT = Path(__file__).resolve().parents[2]
MOST_SAID = 6_000  # characters of a log that tell what a worker was at


class Watcher:
    """One ``manage.py processors run --watch`` after the other, on one route."""

    def __init__(
        self, route: str, names: Sequence[str], copies: int, variables: dict[str, str], log: Path
    ):
        self.route = route
        self._command = [
            *(sys.executable, "-m", "django", "processors", "run", *names),
            *("--watch", "0.2", "--workers", str(copies)),
            # Several processors take turns, and short ones; the workers share the limit.
            *(("--limit", str(10 * copies)) if len(names) > 1 else ()),
        ]
        self._variables = {**os.environ, **variables}
        self._log = log
        self._is_worker = copies == 1
        self._seen: dict[int, psutil.Process] = {}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._variables, cwd=CHECKOUT, stdout=log, stderr=log
            )
        self.parent = psutil.Process(self._process.pid)

    def copies(self) -> list[psutil.Process]:
        """Return the workers that live now; one alone is the watcher itself."""
        if self._is_worker:
            self._seen = {self.parent.pid: self.parent}
        with suppress(psutil.Error):
            for child in self.parent.children():
                if "processors" in child.cmdline():
                    self._seen[child.pid] = child
        return [copy for copy in self._seen.values() if copy.is_running()]

    def workers(self) -> list[psutil.Process]:
        """Return the copies that have a session now."""
        found = []
        for copy in self.copies():
            with suppress(psutil.Error):
                if copy.net_connections("all"):
                    found.append(copy)
        return found

    def mend(self) -> None:
        """Do what a service manager does."""
        self.copies()
        if self._process.poll() is not None:
            self.start()

    def ask_to_stop(self) -> None:
        self.copies()
        if self._process.poll() is None:
            self._process.terminate()

    def end(self, deadline: float) -> list[str]:
        """Wait until all have ended, or end them; return what had to be killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.1, deadline - time.monotonic()))
        left = [copy for copy in self.copies() if copy.status() != psutil.STATUS_ZOMBIE]
        _, left = psutil.wait_procs(left, timeout=max(0.1, deadline - time.monotonic()))
        if self._process.poll() is None:
            left.append(self.parent)
        stuck = []
        for process in left:
            with suppress(psutil.Error):
                age = time.time() - process.create_time()
                stuck.append(f"{process.pid} on {self.route}, {age:.0f} s old")
                # psutil compares the time of its start: a new process of that number is left alone.
                # This one writes its threads' tracebacks into the log.
                process.send_signal(signal.SIGABRT)
        for process in psutil.wait_procs(left, timeout=3)[1]:
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()
        if stuck:
            stuck.append(self._log.read_text(errors="replace")[-MOST_SAID:])
        return stuck


@contextmanager
def at_work(
    routes: Routes, names: Sequence[str], copies: int, folder: Path, **variables: str
) -> Iterator[list[Watcher]]:
    """Start the watchers; stop them politely, and make sure that none is left."""
    watchers = [
        Watcher(
            route,
            names,
            copies,
            {
                **variables,
                "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
                "PYTHONPATH": str(CHECKOUT),
                "CHAOS_DATABASE": json.dumps(database),
                "CHAOS_ROUTE": route,
                "PYTHONFAULTHANDLER": "1",
            },
            folder / f"{names[0]}-{route}.log",
        )
        for route, database in routes.databases.items()
    ]
    try:
        yield watchers
    finally:
        for watcher in watchers:
            watcher.ask_to_stop()
        deadline = time.monotonic() + PATIENCE
        stuck = [what for watcher in watchers for what in watcher.end(deadline)]
    if stuck:
        raise TimeoutError(
            f"workers did not end within {PATIENCE:g} s of being asked: {'; '.join(stuck)}"
        )
