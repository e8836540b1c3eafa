"""Several workers on this machine: the same command line, started so many times.

Each worker is a process that knows its number by a variable of its environment, and prints its own
reports. The parent forwards the stop, starts a worker that has died again, and returns the exit
codes. The pattern is the supervisor of Erlang/OTP, and of every service manager: let a worker
crash, and restart it at once the first time, and then with a growing delay, so that a poison row,
which kills its worker, keeps no worker busy.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.times import backoff
from dcl_processor.options import worker
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import described
from dcl_processor.workers.health import Health
from dcl_processor.workers.stopping import Stop, signals_blocked

#: Processes that one command may start: far more than a machine can use.
MOST_WORKERS = 256

#: The variable by which a process is a worker: a JSON object.
VARIABLE = "DCL_PROCESSOR_WORKER"

#: Seconds between two looks at the workers.
LOOK = 0.1

#: A worker that has lived for this many seconds is restarted as if it had never died before.
LIVED_LONG = 60.0

#: Seconds without a sign of life after which a worker is not alive, and those that it has to load
#: the project.
SILENT, LOADED_WITHIN = 10.0, 60.0

#: The exit codes of the command itself, which another start would not change.
_OWN = range(4)


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker knows of its command: its parent's process, and when it began."""

    number: int
    parent: int
    #: By the steady clock, which processes share.
    began: float
    #: The file by which it shows the parent that it is alive.
    file: str | None = None

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Membership | None:
        """Remove the variable, and be the worker that it names; ``None``: this process is none."""
        text = environment.pop(VARIABLE, None)
        if text is None:
            return None
        found = cls(**json.loads(text))
        worker.number = found.number
        return found

    @property
    def is_orphan(self) -> bool:
        """Whether the parent has died."""
        return os.getppid() != self.parent


@dataclass(slots=True)
class _Place:
    """One worker after the other, under one number."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    #: When the next worker starts, and when the last one did, by the steady clock.
    start_at: float = 0.0
    started: float = 0.0
    deaths: int = 0
    is_told: bool = False
    is_over: bool = False
    #: The worst exit code so far.
    code: int = 0


class Supervisor:
    """Runs workers, numbered from 1, until all of them have ended.

    ``died`` takes a worker's number, and how it died. ``restarts``: whether each that dies is
    started again, as often as it does; otherwise it is once, and the death stays in the exit code.
    ``deadline``: by the steady clock; no worker is started after it.
    """

    def __init__(
        self,
        workers: int,
        health: Health,
        stop: Stop,
        died: Callable[[int, str], None],
        *,
        restarts: bool = False,
        deadline: float | None = None,
    ) -> None:
        self._health, self._stop, self._died = health, stop, died
        self._restarts, self._deadline = restarts, deadline
        self._command = same_command()
        self._places = [_Place(number) for number in range(1, workers + 1)]
        self._began = time.monotonic()
        self._shown_at = 0.0
        #: The folder in which each worker writes a file as long as it is alive.
        self._signs: Path | None = None

    def run(self) -> dict[int, int]:
        """Return the exit code of each worker, by number.

        Once ``stop`` is set, each worker finishes its row, and none is started.
        """
        self._stop.kill = self.kill
        with self._folder() as self._signs:
            while not all(place.is_over for place in self._places):
                for place in self._places:
                    self._look_at(place)
                self._show()
                time.sleep(LOOK)
        return {place.number: place.code for place in self._places}

    def kill(self) -> None:
        """Kill all workers, at the second signal; may be called in a signal handler."""
        for place in self._places:
            if place.process is not None:
                place.process.kill()

    def _look_at(self, place: _Place) -> None:
        if place.is_over:
            return
        if place.process is None:
            if not self._may_start():
                place.is_over = True
            elif time.monotonic() >= place.start_at:
                self._start(place)
        elif (code := place.process.poll()) is not None:
            place.process = None
            self._ended(place, code)
        elif self._stop.is_set() and not place.is_told:
            place.is_told = True
            place.process.terminate()

    def _may_start(self) -> bool:
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        return not self._stop.is_set() and not is_late

    def _start(self, place: _Place) -> None:
        place.started, place.is_told = time.monotonic(), False
        file = None if self._signs is None else str(self._signs / str(place.number))
        known = {"number": place.number, "parent": os.getpid(), "began": self._began, "file": file}
        variables = {**os.environ, VARIABLE: json.dumps(known)}
        if file is not None:
            Path(file).unlink(missing_ok=True)  # which its predecessor has left
        try:
            with signals_blocked():
                place.process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, env=variables
                )
        except OSError as error:
            self._lost(place, f"could not be started: {described(error)}", 1)

    def _ended(self, place: _Place, code: int) -> None:
        if code in _OWN:
            place.is_over, place.code = True, max(place.code, code)
        elif code < 0:
            names = {each.value: each.name for each in signal.Signals}
            self._lost(place, f"killed by {names.get(-code, -code)}", 128 - code)
        else:
            self._lost(place, f"ended with exit code {code} and without a report", code)

    def _lost(self, place: _Place, how: str, code: int) -> None:
        """Report a death, and plan the restart, if there is one."""
        now = time.monotonic()
        lived_long = self._restarts and now - place.started >= LIVED_LONG
        place.deaths = 1 if lived_long else place.deaths + 1
        is_again = self._may_start() and (self._restarts or place.deaths == 1)
        if not (self._restarts and is_again):
            place.code = max(place.code, code)
        words = f"{how}; its committed work stays"
        if is_again:
            wait = 0.0 if place.deaths == 1 else backoff(place.deaths)
            place.start_at = now + wait
            words += f"; it is started again{f' in {wait:.1f} s' if wait else ''}"
        else:
            place.is_over = True
        self._died(place.number, words)

    # --- signs of life

    @contextmanager
    def _folder(self) -> Iterator[Path | None]:
        """Make a folder for the signs of life, beside the file that is made from them."""
        if not self._health.is_shown:
            yield None
            return
        near = None if self._health.file is None else self._health.file.parent
        with TemporaryDirectory(prefix=".dcl-", dir=near, ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def _show(self) -> None:
        """Show the state of the workers, once in each pace."""
        now = time.monotonic()
        if self._signs is not None and now - self._shown_at >= self._health.pace:
            self._shown_at = now
            signs = self._signs
            self._health.beat([_state(each, signs) for each in self._places if not each.is_over])


def _state(place: _Place, signs: Path) -> dict[str, Any]:
    """Return what is to be shown of a worker; one that waits for its restart is alive."""
    document: dict[str, Any] = {}
    age = math.inf
    # Not written yet, or by a worker that died in the middle.
    with suppress(OSError, ValueError):
        file = signs / str(place.number)
        age = time.time() - file.stat().st_mtime
        document = json.loads(file.read_bytes())
    is_loading = time.monotonic() - place.started <= LOADED_WITHIN
    return {
        "worker": place.number,
        "pid": place.process and place.process.pid,
        "is_alive": place.process is None or age <= SILENT or (is_loading and age == math.inf),
        "troubles": document.get("troubles", []),
    }


def same_command() -> list[str]:
    """Return the arguments with which this program was started; raise if it is another one."""
    if sys.argv[1:2] != ["processors"]:
        raise Unsupported(
            "expected manage.py processors, which can be started again, for several workers, got a "
            "call from another program; start it as a program of its own, or run one worker."
        )
    return [sys.executable, *sys.orig_argv[1:]]
