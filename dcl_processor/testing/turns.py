"""Turns: of several threads one moves at a time, from one step of its own to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from threading import Condition


class Kind(Enum):
    """What kind of step a copy stands before; the schedule's opening goes by it."""

    READ = "reads without a lock"
    STATEMENT = "sends any other statement"
    STARTS = "calls the handler"
    RETURNS = "has the handler's result, and has not settled the row"
    SETTLED = "knows the row's outcome"
    WAITS = "waits for rows that others have locked"


@dataclass(frozen=True, slots=True)
class Step:
    """What a copy is about to do."""

    kind: Kind
    what: str


Standing = Mapping[int, Step]

#: Seconds after which a copy is taken to wait for another, or to be in a long handler. Much longer
#: than any statement by itself, or a slow disk would decide how a race goes.
PATIENCE = 3.0


class Turns:
    """Gives the turn to one of the copies that stand; copies are numbered from 1."""

    def __init__(self, copies: int) -> None:
        self._changed = Condition()
        self._standing: dict[int, Step] = {}
        self._moving = set(range(1, copies + 1))
        self._slow: set[int] = set()
        self._everybody_goes = False

    def step(self, copy: int, step: Step) -> None:
        """Stand before a step until it is the copy's turn."""
        with self._changed:
            self._moving.discard(copy)
            self._slow.discard(copy)
            self._standing[copy] = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._everybody_goes or copy not in self._standing)
            self._standing.pop(copy, None)
            self._moving.add(copy)

    def ended(self, copy: int) -> None:
        """Be told that a copy moves no more."""
        with self._changed:
            self._moving.discard(copy)
            self._changed.notify_all()

    def let_everybody_go(self) -> None:
        """End the turns: whoever stands goes on, and nobody stands any more."""
        with self._changed:
            self._everybody_goes = True
            self._changed.notify_all()

    def give(self, choose: Callable[[Standing], int], until: float) -> bool:
        """Give turns until all copies have ended, or the turns have.

        ``choose``: picks one of those that stand. ``until``: when to give up, by the monotonic
        clock; returns False then.
        """
        with self._changed:
            # How the race begins is not to depend on how fast the threads connect.
            self._changed.wait_for(lambda: not self._moving, until - time.monotonic())
            while self._somebody_stands(until):
                copy = choose(self._standing)
                del self._standing[copy]
                self._moving.add(copy)
                self._changed.notify_all()
            return self._everybody_goes or not (self._moving or self._standing)

    def _somebody_stands(self, until: float) -> bool:
        # A copy may wait in the database for what another one holds: the turn goes on then.
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
