"""Turns: one of several threads moves at a time, from one of its steps to the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from threading import Condition

from dcl_processor import steady as time


class Kind(Enum):
    """The kind of step that a worker stands before; the schedule's opening depends on it."""

    READ = "reads without a lock"
    STATEMENT = "sends any other statement"
    STARTS = "calls the handler"
    RETURNS = "has the handler's result, and has not settled the row"
    SETTLED = "knows the row's outcome"
    WAITS = "waits for rows that others have locked"


#: Seconds after which a worker is assumed to wait for another, or to be in a long handler. Much
#: longer than any statement takes, so that a slow disk does not change the race.
PATIENCE = 3.0

#: Steps that are shown, the last ones, and characters of each.
LAST, WIDTH = 100, 34


class _Over(Exception):
    """No worker stands any more, or the time is up."""


class Turns:
    """Gives the turn to one of the workers that stand; they are numbered from 1.

    ``until``: when to give up, by the monotonic clock.
    """

    def __init__(self, workers: int, until: float) -> None:
        self._workers, self._until = workers, until
        self._changed = Condition()
        #: The kind of step before which each worker stands; read by the schedule.
        self.standing: dict[int, Kind] = {}
        self._moving = set(range(1, workers + 1))
        self._slow: set[int] = set()
        self._everybody_goes = False
        self._taken: list[tuple[int, str]] = []

    # --- what the workers call

    def step(self, worker: int, kind: Kind, what: str) -> None:
        """Stand before a step until it is the worker's turn."""
        with self._changed:
            self._moving.discard(worker)
            self._slow.discard(worker)
            self.standing[worker] = kind
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._everybody_goes or worker not in self.standing)
            self.standing.pop(worker, None)
            self._moving.add(worker)
            self.note(worker, what)

    def note(self, worker: int, what: str) -> None:
        """Add a step to those that are shown, until the turns have ended."""
        if not self._everybody_goes:
            self._taken.append((worker, what))

    def ended(self, worker: int) -> None:
        """Note that a worker moves no more."""
        with self._changed:
            self._moving.discard(worker)
            self._changed.notify_all()

    def let_everybody_go(self) -> None:
        """End the turns: every worker that stands goes on, and no worker stops at a step again."""
        with self._changed:
            self._everybody_goes = True
            self._changed.notify_all()

    # --- the schedule

    def give(self, schedule: Callable[[], None]) -> bool:
        """Let the schedule ``move()`` workers until all have ended; return whether it was in time.

        It is also in time if the turns were ended.
        """
        with self._changed:
            # The start of the race must not depend on how fast the threads connect.
            self._changed.wait_for(lambda: not self._moving, self._until - time.monotonic())
            with suppress(_Over):
                self._look()
                schedule()
            return self._everybody_goes or not (self._moving or self.standing)

    def move(self, worker: int) -> None:
        """Give the turn to a worker that stands; to be called by the schedule."""
        del self.standing[worker]
        self._moving.add(worker)
        self._changed.notify_all()
        self._look()

    def _look(self) -> None:
        """Wait until a worker stands that may move."""
        # A worker may wait in the database for another worker's lock: then the turn passes on.
        if not self._changed.wait_for(
            lambda: self._everybody_goes or not self._moving - self._slow, PATIENCE
        ):
            self._slow |= self._moving
        left = self._until - time.monotonic()
        self._changed.wait_for(
            lambda: self.standing or not self._moving or self._everybody_goes, max(left, 0)
        )
        if not self.standing or left <= 0 or self._everybody_goes:
            raise _Over

    def __str__(self) -> str:
        """Return the last steps, with one column per worker."""
        lines = [_line("step", [f"worker {n}" for n in range(1, self._workers + 1)])]
        for number, (worker, what) in [*enumerate(self._taken, 1)][-LAST:]:
            cells = ["", *[""] * self._workers]
            cells[worker] = what
            lines.append(_line(str(number), cells[1:]))
        return "\n".join(lines)


def _line(number: str, cells: list[str]) -> str:
    shown = (f"{cell:.{WIDTH}}".ljust(WIDTH) for cell in cells)
    return f"{number:>4}  {'  '.join(shown)}".rstrip()
