"""The watch: run after run in this process, for one processor or for several in turn.

The watch itself prints nothing. It calls a function with each event.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from django.db import close_old_connections

from dcl_processor.operator.diagnosis import Trouble
from dcl_processor.operator.times import backoff
from dcl_processor.pending import steady as time
from dcl_processor.report.report import TRIED, Report
from dcl_processor.workers.notify import Listener, alias, channel

if TYPE_CHECKING:
    from dcl_processor.processor import BatchProcessor

#: Seconds between two looks for a stop while a watch waits, which is most of its life.
POLL_IDLE = 0.2

#: Seconds of nothing but trouble after which a watch ends.
HOPELESS_AFTER = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of a watch; ``limit`` is for each run."""

    #: Seconds between two looks.
    interval: float
    using: str | None = None
    limit: int | None = None
    concurrency: int | None = None
    #: When the watch ends, by the monotonic clock, which processes share.
    deadline: float | None = None
    listen: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """A processor could be run again after a trouble."""


#: What happens in a watch: a run that did something, or that could not be made.
Event = Report | Trouble | Recovered

#: Takes a processor's name, and what happened to it.
Tell = Callable[[str, Event], None]


@dataclass(slots=True)
class Watch:
    """Watches until it is stopped, or reaches the end of its plan."""

    processors: Sequence[BatchProcessor[Any]]
    plan: Plan
    stop: threading.Event
    tell: Tell
    #: When a run was last without trouble, by the monotonic clock.
    _fine_at: float = field(default_factory=time.monotonic)
    _turns: dict[str, Turn] = field(default_factory=dict)
    _listeners: list[Listener] = field(default_factory=list)

    def run(self) -> bool:
        """Take the processor that has been due longest, run it, and wait until one is due.

        Returns whether there was a processor to run until the end: not after an hour in which no
        run was without trouble.
        """
        self._turns = {each.name: Turn(each, self.plan.interval) for each in self.processors}
        self._listeners = self._listen() if self.plan.listen else []
        try:
            while self._turns and not self._is_over():
                turn = min(self._turns.values(), key=lambda turn: turn.due)
                self._wait(turn.due)
                if turn.due <= time.monotonic() and not self._is_over():
                    self._run(turn)
        finally:
            for listener in self._listeners:
                listener.close()
        return bool(self._turns)

    def _listen(self) -> list[Listener]:
        names: dict[str, dict[str, str]] = {}
        for each in self.processors:
            with suppress(Exception):  # the run will report why it cannot be asked
                using = alias(each, self.plan.using)
                names.setdefault(using, {})[channel(each.name)] = each.name
        return [Listener(using, channels) for using, channels in names.items()]

    def _is_over(self) -> bool:
        return self.stop.is_set() or self._seconds_left() == 0

    def _seconds_left(self) -> float | None:
        deadline = self.plan.deadline
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def _wait(self, until: float) -> None:
        """Wait until then, or until the end of the plan, a stop, or a notification."""
        if until > time.monotonic():
            close_old_connections()
        if self.plan.deadline is not None:
            until = min(until, self.plan.deadline)
        while not self._is_woken() and not self.stop.is_set():
            left = until - time.monotonic()
            if left <= 0:
                break
            # Without listeners, this call only waits.
            listening: list[Any] = [each for each in self._listeners if each.is_open]
            connection.wait(listening, min(left, POLL_IDLE))

    def _is_woken(self) -> bool:
        woken = {name for listener in self._listeners for name in listener.poll()}
        for name in woken & self._turns.keys():
            self._turns[name].wake()
        return bool(woken)

    def _run(self, turn: Turn) -> None:
        processor, trouble = turn.processor, None
        try:
            report = processor.run(
                using=self.plan.using,
                limit=self.plan.limit,
                timeout=self._seconds_left(),
                # A worker that has a row locked is at work on it, and new rows are not to wait for
                # that: the next run looks at the locked row again.
                wait_for_locked=0,
                concurrency=self.plan.concurrency,
                stop=self.stop,
            )
            if report.error is not None:
                trouble = Trouble.of_resource(report.error)
        except Exception as error:  # noqa: BLE001  # the others, and the next try, are still to come
            trouble = Trouble.of(error, processor, self.plan.using)
            report = trouble.report or Report(name=processor.name)
        if trouble is None or did_something(report):
            self._fine_at = time.monotonic()
        if did_something(report):
            self.tell(processor.name, report)
        if trouble is not None:
            self._broke(turn, trouble)
            return
        if turn.failures:
            self.tell(processor.name, Recovered())
        turn.ran(report)

    def _broke(self, turn: Turn, trouble: Trouble) -> None:
        self.tell(turn.processor.name, trouble)
        turn.broke()
        if trouble.is_final:
            del self._turns[turn.processor.name]
        if time.monotonic() - self._fine_at >= HOPELESS_AFTER:
            self._turns.clear()


def did_something(report: Report) -> bool:
    """Return whether any row was tried; other workers report the rows that they have locked."""
    return any(getattr(report, each) for each in (*TRIED, "lease_lost"))


@dataclass(slots=True)
class Turn:
    """When a watched processor runs next: at once after work, later each time when it is broken.

    A part of each wait is random, so that workers that started together, or lost their server
    together, do not come back together. ``due``: the time of the next run; ``failures``: runs that
    could not be made, since the last one that could.
    """

    processor: BatchProcessor[Any]
    interval: float
    due: float = field(default_factory=time.monotonic)
    failures: int = 0

    def ran(self, report: Report) -> None:
        """Run again at once after a run that made progress, unless it would try the same rows."""
        self.failures = 0
        has_more = report.stopped in {"limit", "timeout"}
        drained = report.stopped == "drained" and not (report.failed or report.snoozed)
        got_on = report.processed + report.discarded > 0
        self.due = time.monotonic()
        if not (got_on and (has_more or drained)):
            self.due += self.interval * random.uniform(0.75, 1)  # noqa: S311  # no secret

    def broke(self) -> None:
        """Postpone the next try after a run that could not be made."""
        self.failures += 1
        self.due = time.monotonic() + backoff(self.failures)

    def wake(self) -> None:
        """Run now, unless it has to recover."""
        if not self.failures:
            self.due = time.monotonic()
