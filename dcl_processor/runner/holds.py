"""Whether a run may start rows now: the processor's ``throttle()``, and an overseer, if any.

A run waits for a short hold, as it waits for locked rows, and ends at a longer one: the next run
asks again, so that no worker is kept busy by waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dcl_processor import steady as time
from dcl_processor.exceptions import Unsupported
from dcl_processor.execution.calls import beside
from dcl_processor.oversight import Hold, Overseer
from dcl_processor.values import DAY, expect_seconds

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: Seconds. A run waits for holds up to this long, and ends at longer ones.
LONGEST = 10.0

#: Seconds for which a ``throttle()`` that returned ``True`` holds the rows.
PAUSE = 30.0

#: Seconds between two calls of ``throttle()``, which may send a query.
ASK_EVERY = 1.0


class Holds:
    """The holds of one run."""

    def __init__(self, processor: Definition[Any], overseer: Overseer | None) -> None:
        self._overseer = overseer
        #: The window of the rate to which the rows belong that were let start last.
        self.window = 0
        #: Returns whether no row of a batch may start either; called by all threads.
        self.must_stop: Callable[[], bool] = bool if overseer is None else overseer.must_stop
        self._throttle = processor.throttle if processor._has_throttle else None
        self._name = processor.name
        self._named = f"{processor.name}: expected throttle()"
        self._ask_at = 0.0
        self._held_until = 0.0

    def now(self) -> Hold | None:
        """Return why no row may start now; raises what ``throttle()`` raises."""
        if self._overseer is not None and (hold := self._overseer.hold()) is not None:
            return hold
        return None if self._throttle is None else self._throttled(self._throttle)

    def _throttled(self, throttle: Callable[[], Any]) -> Hold | None:
        now = time.monotonic()
        if now >= max(self._ask_at, self._held_until):
            self._held_until = time.monotonic() + _seconds(
                self._named, beside(self._name, "throttle()", (), throttle)
            )
            now = time.monotonic()
            self._ask_at = now + ASK_EVERY
        left = self._held_until - now
        return Hold("throttled", left) if left > 0 else None

    def take(self, rows: int, *, whole: bool = False) -> int:
        """Return how many of so many rows may start; ``whole``: all of them or none."""
        # First: rows that the overseer has let start must start, or be given back by a batch.
        if self._throttle is not None and self._throttled(self._throttle) is not None:
            return 0
        if self._overseer is not None:
            rows = self._overseer.take(rows, whole=whole)
            self.window = self._overseer.window
        return rows

    def give_back(self, rows: int, window: int) -> None:
        """Take note that a batch of a window was counted; so many of its rows did not start."""
        if self._overseer is not None:
            self._overseer.give_back(rows, window)


def _seconds(named: str, answer: Any) -> float:
    """Return for how long ``throttle()`` holds the rows, by what it returned."""
    if answer is None or answer is False:
        return 0.0
    if answer is True:
        return PAUSE
    if isinstance(answer, timedelta):
        answer = answer.total_seconds()
    return expect_seconds(
        named, answer, most=DAY, fix="; return None if rows may start, True if not"
    )


def refuse_without_ledger(processor: Definition[Any]) -> None:
    """Raise ``Unsupported`` if the processor has an option that only the ledger can keep."""
    for option in ("rate", "breaker"):
        if getattr(processor, option) is not None:
            raise Unsupported(
                f"{processor.name}: expected 'dcl_processor.ledger' in INSTALLED_APPS, and on, for "
                f"{option}, which all machines keep together, got none; add the app and migrate, "
                f"or leave {option} out."
            )
