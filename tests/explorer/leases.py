"""Time and heartbeats as actors: a lease lapses, or is renewed, at any step of the others.

The database's clock is put forward by a function of its name that stands before it in the search
path of the actors' sessions, and the processes' clock by as much. A heartbeat comes when it is
told to, as often in a run as its actor ``beats``; its thread belongs to the stage, which keeps its
connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from tests import seams

from .actors import Actor, here
from .steps import Step, kinds

#: Seconds, more than a lease lasts.
LAPSE = 1_000

_LAPSES = Step("every lease lapses", writes=kinds("time"))
_BEAT = Step("heartbeat")
_OURS = Step("is it ours?", reads=kinds("time"))
_ENDS = Step("wait for the heartbeat")
_WAIT = Step("wait for a lock", reads=kinds("lock"))


class Clock:
    """The processes' clock: it stands still, but for what lets time pass."""

    def __init__(self) -> None:
        self._now = self._began = 1_000.0

    def monotonic(self) -> float:
        return self._now

    def set_back(self) -> None:
        self._now = self._began

    def go_on(self, seconds: float) -> None:
        self._now += seconds

    def lapse(self) -> None:
        """Be the job of an actor: let time pass, on all clocks at once."""
        here().point(_LAPSES)
        driver: Any = connection.connection
        self.let_pass(driver.execute)

    def let_pass(self, execute: Callable[[str], Any]) -> None:
        execute(f"UPDATE explorer.clock SET passed = passed + {LAPSE}")  # noqa: S608  # a number
        self.go_on(LAPSE)


@dataclass
class Hands:
    """Where the leases of the workers are renewed by ``hearts``, or not at all, by the clock.

    ``join_in`` is called with an actor that begins in the middle of a schedule. A copy whose row is
    locked waits until it ``is_free``.
    """

    hearts: Sequence[Actor]
    clock: Clock
    join_in: Callable[[Actor], None]
    is_free: Callable[[Actor], bool]

    @contextmanager
    def holding(self) -> Iterator[None]:
        asks = seams.part(seams.IS_OURS)

        def is_ours(heart: Any, pk: Any) -> Any:
            here().point(_shared(replace(_OURS, rows=frozenset([pk]))))
            return asks(heart, pk)

        with pytest.MonkeyPatch.context() as patch:
            seams.replace(patch, seams.THREADING, self._threading())
            seams.replace(patch, seams.CLOCK, self.clock.monotonic)
            seams.replace(patch, seams.PAUSE, lambda _, seconds: self._pause(seconds))
            seams.replace(patch, seams.KEEP, _beat)
            seams.replace(patch, seams.IS_OURS, is_ours)
            for seam in seams.HEART:
                met = self._meeting(Step(seam[1].replace("_", " ")), seams.part(seam))
                seams.replace(patch, seam, met)
            yield

    def heart_of(self, copy: Actor) -> Actor | None:
        return next((each for each in self.hearts if each.of == copy.number), None)

    def _pause(self, seconds: float) -> None:
        # For a row that another session has locked, whose settlement is tried again then.
        actor = here()
        step = replace(_WAIT, rows=actor.rows)
        actor.point(step, ready=lambda: not actor.watched or self.is_free(actor))
        self.clock.go_on(seconds + 0.001)

    def _meeting(self, step: Step, method: Callable[..., Any]) -> Callable[..., Any]:
        def met(heart: Any, *args: Any) -> Any:
            if self.heart_of(here()) is not None and not here().is_heart:
                here().point(_shared(replace(step, rows=here().rows)))
            return method(heart, *args)

        return met

    def _threading(self) -> Any:
        hands = self

        class HeartThread:
            def __init__(
                self, target: Callable[..., None], args: Sequence[Any] = (), **_: Any
            ) -> None:
                self._target = partial(target, *args)
                self._heart = hands.heart_of(here())

            def start(self) -> None:
                if self._heart is not None and here().watched:
                    hands.join_in(self._heart)
                    self._heart.begin(self._target, watched=True)

            def is_alive(self) -> bool:
                return self._heart is not None and here().watched

            def join(self, _: float | None = None) -> None:
                heart = self._heart
                here().point(_shared(_ENDS), ready=lambda: heart is None or heart.has_ended)

        return SimpleNamespace(**{**vars(threading), "Thread": HeartThread})


def _beat(heart: Any) -> None:
    # As its thread does, but for the errors, which are the scheduler's to judge here.
    for _ in range(here().beats):
        here().point(_BEAT)
        seams.beat(heart)


def _shared(step: Step) -> Step:
    """Add the leases in memory: only a copy and its own heart share them."""
    return replace(step, writes=step.writes | {here().memory})
