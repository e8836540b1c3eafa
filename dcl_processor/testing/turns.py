"""Turns: one of several threads moves at a time, from one of its steps to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Step:
    """What a worker is about to do."""

    kind: Kind
    what: str


Standing = Mapping[int, Step]

#: Seconds after which a worker is assumed to wait for another, or to be in a long handler. Much
#: longer than any statement takes, so that a slow disk does not change the race.
PATIENCE = 3.0


class Turns:
    """Gives the turn to one of the workers that stand; workers are numbered from 1."""

    def __init__(self, workers: int) -> None:
        self._changed = Condition()
        self._standing: dict[int, Step] = {}
        self._moving = set(range(1, workers + 1))
        self._slow: set[int] = set()
        self._everybody_goes = False

    def step(self, worker: int, step: Step) -> None:
        """Stand before a step until it is the worker's turn."""
        with self._changed:
            self._moving.discard(worker)
            self._slow.discard(worker)
            self._standing[worker] = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._everybody_goes or worker not in self._standing)
            self._standing.pop(worker, None)
            self._moving.add(worker)

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

    def give(self, choose: Callable[[Standing], int], until: float) -> bool:
        """Give turns until all workers have ended, or the turns have.

        ``choose``: picks one of the workers that stand. ``until``: when to give up, by the
        monotonic clock; returns False then.
        """
        with self._changed:
            # The start of the race must not depend on how fast the threads connect.
            self._changed.wait_for(lambda: not self._moving, until - time.monotonic())
            while self._any_racer_stands(until):
                worker = choose(self._standing)
                del self._standing[worker]
                self._moving.add(worker)
                self._changed.notify_all()
            return self._everybody_goes or not (self._moving or self._standing)

    def _any_racer_stands(self, until: float) -> bool:
        # A worker may wait in the database for another worker's lock: then the turn passes on.
        here = self._changed.wait_for(
            lambda: self._everybody_goes or not self._moving - self._slow, PATIENCE
        )
        if not here:
            self._slow |= self._moving
        left = until - time.monotonic()
        self._changed.wait_for(
            lambda: self._standing or not self._moving or self._everybody_goes, max(left, 0)
        )
        return bool(self._standing) and left > 0 and not self._everybody_goes
