"""Several workers on this machine: the same command line, started so many times.

Each worker is a process that knows its number by a variable of its environment, and prints its own
reports. The parent forwards the stop, starts a worker of a watch that has died again, and returns
the exit codes. The pattern is the supervisor of Erlang/OTP, and of every service manager: let a
worker crash, and restart it with a growing delay, so that a poison row, which kills its worker,
keeps no worker busy.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.times import backoff
from dcl_processor.options import worker
from dcl_processor.pending import steady as time
from dcl_processor.workers.stopping import Stop

#: Processes that one command may start: far more than a machine can use.
MOST_WORKERS = 256

#: The variable by which a process is a worker: a JSON object.
VARIABLE = "DCL_PROCESSOR_WORKER"

#: Seconds between two looks at the workers.
LOOK = 0.1

#: A worker that has lived for this many seconds is restarted as if it had never died before.
LIVED_LONG = 60.0

#: The exit codes of the command itself, which another start would not change.
_OWN = range(4)


def label(names: Sequence[str], number: int = 1, workers: int = 1) -> str:
    """Return a worker's name for people, such as ``"shop.send_shipped_emails 2/4"``."""
    work = names[0] if len(names) == 1 else f"{len(names)} processors"
    return f"{work} {number}/{workers}" if workers > 1 else work


def name_sessions(work: str) -> None:
    """Give a worker's name to the sessions of PostgreSQL that this process opens from now on.

    The name is the one column of ``pg_stat_activity`` that every role may read. A project's own
    name, by the variable or in ``DATABASES``, stays.
    """
    os.environ.setdefault("PGAPPNAME", f"dcl {work} {socket.gethostname()[:8]}")


def same_command() -> list[str]:
    """Return the arguments with which this program was started; raise if it is another one."""
    if sys.argv[1:2] != ["processors"]:
        raise Unsupported(
            "expected manage.py processors, which can be started again, for several workers, got a "
            "call from another program; start it as a program of its own, or run one worker."
        )
    return [sys.executable, *sys.orig_argv[1:]]


@dataclass(frozen=True, slots=True)
class Membership:
    """What a worker knows of its command: its parent's process, and when it began."""

    number: int
    parent: int
    #: By the steady clock, which processes share.
    began: float

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
    #: The exit code of the last one.
    code: int | None = None


class Supervisor:
    """Runs workers, numbered from 1, until all of them have ended.

    ``died`` takes a worker's number, and how it died. ``restarts``: whether one that dies is
    started again. ``deadline``: by the steady clock; no worker is started after it.
    """

    def __init__(
        self,
        workers: int,
        stop: Stop,
        died: Callable[[int, str], None],
        *,
        restarts: bool = False,
        deadline: float | None = None,
    ) -> None:
        self._stop, self._died = stop, died
        self._restarts, self._deadline = restarts, deadline
        self._command = same_command()
        self._places = [_Place(number) for number in range(1, workers + 1)]
        self._began = time.monotonic()

    def run(self) -> dict[int, int]:
        """Return the exit code of each worker, by number.

        Once ``stop`` is set, each worker finishes its row, and none is started.
        """
        self._stop.kill = self.kill
        while open_ := [place for place in self._places if place.code is None]:
            for place in open_:
                self._look_at(place)
            time.sleep(LOOK)
        return {place.number: place.code or 0 for place in self._places}

    def kill(self) -> None:
        """Kill all workers, at the second signal; may be called in a signal handler."""
        for place in self._places:
            if place.process is not None:
                place.process.kill()

    def _look_at(self, place: _Place) -> None:
        if place.process is None:
            if not self._may_start():
                place.code = 0
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
        place.started = time.monotonic()
        member = Membership(place.number, os.getpid(), self._began)
        place.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, VARIABLE: json.dumps(asdict(member))},
            # A terminal sends its signals to a whole group, and the parent passes them on.
            process_group=0,
        )

    def _ended(self, place: _Place, code: int) -> None:
        """Note the exit code of a worker, or report its death, and perhaps plan the restart."""
        if place.is_told and code == -signal.SIGTERM:
            code = 0  # before it had a handler for the signal, and so before it had a row
        if code in _OWN:
            place.code = code
            return
        how = f"ended with exit code {code} and without a report"
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}
            how, code = f"killed by {names.get(-code, -code)}", 128 - code
        how += "; its committed work stays"
        if self._restarts and self._may_start():
            lived_long = time.monotonic() - place.started >= LIVED_LONG
            place.deaths = 1 if lived_long else place.deaths + 1
            wait = backoff(place.deaths)
            place.start_at = time.monotonic() + wait
            how += f"; it is started again in {wait:.1f} s"
        else:
            place.code = code
        self._died(place.number, how)
