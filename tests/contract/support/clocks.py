"""The clock of a run: a test lets time pass, and waits for none of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event

#: Seconds that no test takes, on any machine.
HOUR = 3600.0


@dataclass
class Clock:
    """The monotonic clock, ``passed`` seconds ahead."""

    passed: float = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


class Waits(Event):
    """A stop that is never set: what a run waits for passes at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._clock.passed += timeout
        return False
