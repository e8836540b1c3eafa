"""Time and heartbeats as actors: a lease lapses, or is renewed, at any step of the others.

The database's clock is put forward by a function of its name that stands before it in the search
path of the actors' sessions, and the processes' clock by as much. A heartbeat comes when it is
told to, as often in a run as its actor ``beats``; its thread belongs to the stage, which keeps its
connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection

from dcl_processor.engine import heartbeat, lane, settling
from dcl_processor.engine.heartbeat import Heartbeat

from .actors import Actor, here
from .steps import Step, kinds

#: Seconds, more than a lease lasts.
LAPSE = 1_000

_LAPSES = Step("every lease lapses", writes=kinds("time"))
_BEAT = Step("heartbeat")
_OURS = Step("is it ours?", reads=kinds("time"))
_LET_GO = Step("let go")
_ENDS = Step("wait for the heartbeat")


@dataclass
class Clock:
    """The processes' clock: ``passed`` seconds ahead."""

    passed: int = 0

    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return time.monotonic() + self.passed

    def set_back(self) -> None:
        self.passed = 0

    def lapse(self) -> None:
        """Be the job of an actor: let time pass, on all clocks at once."""
        here().point(_LAPSES)
        driver: Any = connection.connection
        driver.execute("UPDATE explorer.clock SET passed = passed + %s", [LAPSE])
        self.passed += LAPSE


@contextmanager
def in_the_hands_of(
    hearts: Sequence[Actor], clock: Clock, join_in: Callable[[Actor], None]
) -> Iterator[None]:
    """Let the keepers of the workers beat by these actors, or not at all, and go by the clock.

    ``join_in`` is called with an actor that begins in the middle of a schedule.
    """

    class HeartThread:
        def __init__(self, target: Callable[[], None], **_: Any) -> None:
            self._target = target
            self._heart = next((each for each in hearts if each.of == here().number), None)

        def start(self) -> None:
            if self._heart is not None and here().watched:
                join_in(self._heart)
                self._heart.begin(self._target, watched=True)

        def is_alive(self) -> bool:
            return self._heart is not None and here().watched

        def join(self, _: float | None = None) -> None:
            heart = self._heart
            here().point(_of_keeper(_ENDS), ready=lambda: heart is None or heart.has_ended)

    with pytest.MonkeyPatch.context() as patch:
        with_hearts = SimpleNamespace(**{**vars(threading), "Thread": HeartThread})
        patch.setattr(heartbeat, "threading", with_hearts)
        patch.setattr(heartbeat, "time", clock)
        for module in (lane, settling):
            patch.setattr(module, "time", clock)
        patch.setattr(Heartbeat, "_keep", _beat)
        patch.setattr(Heartbeat, "is_ours", _pausing(_OURS, Heartbeat.is_ours))
        patch.setattr(Heartbeat, "let_go", _pausing(_LET_GO, Heartbeat.let_go))
        yield


def _beat(self: Heartbeat) -> None:
    # As its thread does, but for the errors, which are the scheduler's to judge here.
    for _ in range(here().beats):
        here().point(_BEAT)
        if not self._stop.is_set():
            question, locked = self._renew()
            if question is not None and locked:
                self._wait_for(question, locked)


def _pausing(step: Step, method: Callable[..., Any]) -> Callable[..., Any]:
    def paused(self: Heartbeat, pk: Any, *args: Any) -> Any:
        here().point(_of_keeper(replace(step, rows=frozenset([pk]))))
        return method(self, pk, *args)

    return paused


def _of_keeper(step: Step) -> Step:
    """Add what the keeper has in memory: only a copy and its own heart share it."""
    return replace(step, writes=step.writes | {here().memory})
