"""Keeps the workers of a watch alive: restarts one that dies, at no cost to the others.

The pattern is the supervisor of Erlang/OTP, and of every service manager: let a worker crash, and
restart it with a growing delay, so that a poison row, which kills its worker, keeps no worker busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from threading import Event
from typing import Any

from dcl_processor import registry
from dcl_processor.report import Report

from .child import STOP, Send, Trouble, portable
from .child_handle import Copy, start
from .polling import retry_after
from .stopping import POLL_IDLE, Stop, StoppedAtOnce
from .watch import GoesOn, Plan, Watch
from .worker_pool import check_copies, databases_for_others, shares

#: A worker that has lived for this many seconds is restarted as if it had never died before.
LIVED_LONG = 60.0


@dataclass(frozen=True, slots=True)
class Died:
    """A worker has died, or did not start; ``wait``: seconds until its restart, ``None``: none."""

    how: Trouble
    wait: float | None

    def __str__(self) -> str:
        again = "" if self.wait is None else f"; it is started again in {self.wait:.1f} s"
        return f"{self.how.sentence}{again}"


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A worker has nothing left to run."""


News = Report | Trouble | GoesOn | Died

#: Takes a worker's number, the processor's name (``None``: the worker itself), and the news of it.
TellOfCopy = Callable[[int, str | None, News], None]


@dataclass(frozen=True, slots=True)
class WatchWork:
    """The work of one worker of a watch."""

    names: Sequence[str]
    plan: Plan
    databases: Mapping[str, Any]

    def run(self, stop: Stop, send: Send) -> None:
        """Watch; send each event, and each row if rows are counted."""

        def tell(name: str, news: Report | Trouble | GoesOn) -> None:
            send((name, portable(news) if isinstance(news, Report) else news))

        counts = self.plan.max_rows is not None
        watch = Watch(
            registry.get(self.names),
            self.plan,
            stop,
            tell,
            on_row=send if counts else lambda _: None,
        )
        if not watch.run():
            send(GaveUp())


class _Place:
    """One worker after the other, under one number."""

    def __init__(self, number: int, work: WatchWork, tell: TellOfCopy) -> None:
        self._number = number
        self._work = work
        self._tell = tell
        self.copy: Copy | None = None
        self.is_over = False
        self.gave_up = False
        self._stopping = False
        self._start_at = self._started = 0.0
        self._deaths = 0

    def fill(self) -> None:
        """Start a worker, if there is none and it is time."""
        if self.copy is not None or self.is_over:
            return
        now, deadline = time.monotonic(), self._work.plan.deadline
        self.is_over = deadline is not None and now >= deadline
        if now >= self._start_at and not self.is_over:
            self._started = now
            start(f"copy {self._number}", self._work, self._began)

    def _began(self, begun: Copy | Trouble) -> None:
        if isinstance(begun, Trouble):
            self._bury(begun)
        else:
            self.copy = begun

    def hear(self) -> None:
        """Take one message from the worker."""
        assert self.copy is not None
        if not self.copy.hear(self._take):
            return
        copy, self.copy = self.copy, None
        copy.end()
        # An unexpected error ends a worker like a signal does, and may not occur in the next one.
        if isinstance(copy.outcome, Trouble):
            self._bury(copy.outcome)
        else:
            self.is_over = True

    def stop(self) -> None:
        """Let the worker finish its row, and start no other; may be called repeatedly."""
        if self.copy is None:
            self.is_over = True
        elif not self._stopping:
            self.copy.tell(STOP)
        self._stopping = True

    def _take(self, message: Any) -> None:
        if isinstance(message, GaveUp):
            self.gave_up = True
            return
        if isinstance(message, tuple):
            self._tell(self._number, *message)
            return
        # A row was tried: the worker after this one has one row less to try.
        plan = self._work.plan
        assert plan.max_rows is not None
        self._work = replace(self._work, plan=replace(plan, max_rows=plan.max_rows - 1))

    def _bury(self, how: Trouble) -> None:
        lived = time.monotonic() - self._started
        self._deaths = 1 if lived >= LIVED_LONG else self._deaths + 1
        # A fault of the program would end the next worker, too.
        self.is_over = self.gave_up = self.gave_up or how.is_final
        wait = None if self._stopping or self.is_over else retry_after(self._deaths)
        self._start_at = time.monotonic() + (wait or 0)
        self._tell(self._number, None, Died(how, wait))


def keep(names: Sequence[str], copies: int, plan: Plan, *, stop: Event, tell: TellOfCopy) -> bool:
    """Watch in ``copies`` processes; return whether one had a processor to run until the end.

    ``max_rows`` of the plan is for all processes together. Raises ``InvalidOption`` for less than
    one process, and ``Unsupported`` where other processes could not see the rows.
    """
    check_copies(copies)
    databases = databases_for_others()
    places = [
        _Place(number, WatchWork(names, replace(plan, max_rows=rows), databases), tell)
        for number, rows in enumerate(shares(plan.max_rows, copies), start=1)
    ]
    try:
        _keep(places, stop)
    except StoppedAtOnce:
        for copy in _copies(places):
            copy.stop_at_once()
        raise
    finally:
        for copy in _copies(places):
            copy.end()
    return not all(place.gave_up for place in places)


def _keep(places: Sequence[_Place], stop: Event) -> None:
    while not all(place.is_over for place in places):
        for place in places:
            if stop.is_set():
                place.stop()
            else:
                place.fill()
        for place in _ready(places):
            place.hear()


def _ready(places: Sequence[_Place]) -> list[_Place]:
    ends: dict[Any, _Place] = {
        place.copy.results: place for place in places if place.copy is not None
    }
    return [ends[end] for end in connection.wait(list(ends), POLL_IDLE) if end in ends]


def _copies(places: Sequence[_Place]) -> list[Copy]:
    return [place.copy for place in places if place.copy is not None]
