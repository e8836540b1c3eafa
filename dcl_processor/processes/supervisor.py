"""The supervisor: starts worker processes (copies), and waits until all of them have ended.

A copy that dies costs the others nothing. With ``restart`` it is started again. The pattern is the
supervisor of Erlang/OTP, and of every service manager: let a worker crash, and restart it with a
growing delay, so that a poison row, which kills its worker, keeps no worker busy. After a first
death there is no delay: a spare takes the place of the copy. It is a child that has loaded the
processors, has no connection, and waits for work.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from django.db import connections

from dcl_processor.diagnosis import Trouble, describe
from dcl_processor.exceptions import Unsupported
from dcl_processor.watch.polling import BACKOFF, POLL_IDLE, Backoff
from dcl_processor.watch.watch import Event

from .child import STOP, Child, Ended, Order, Phase, Work, signals_blocked
from .graceful_stop import StoppedAtOnce

#: A copy that has lived for this many seconds is restarted as if it had never died before.
LIVED_LONG = 60.0


@dataclass(frozen=True, slots=True)
class Died:
    """A copy has died, or did not start.

    ``wait``: seconds until its restart, 0 if a spare takes its place, ``None`` without a restart.
    """

    trouble: Trouble
    wait: float | None

    def __str__(self) -> str:
        match self.wait:
            case None:
                again = ""
            case 0:
                again = "; the spare takes its place"
            case wait:
                again = f"; it is started again in {wait:.1f} s"
        return f"{self.trouble.sentence}{again}"


@dataclass(frozen=True, slots=True)
class SpareReady:
    """A spare waits for work."""

    pid: int | None


News = Event | Died | SpareReady

#: The number of the spare, which is no copy yet.
SPARE = 0

#: Takes a copy's number (or ``SPARE``), a processor's name (``None``: the copy itself), and what
#: happened to it.
Tell = Callable[[int, str | None, News], None]


@dataclass(slots=True)
class _Place:
    """One copy after the other, under one number."""

    number: int
    child: Child | None = None
    #: When the next copy starts, and when the last one did, by the monotonic clock.
    start_at: float = 0.0
    started: float = 0.0
    deaths: int = 0
    is_stopping: bool = False
    is_over: bool = False
    #: Whether the last copy had work until its end.
    had_work: bool = True


@dataclass(slots=True)
class Supervisor:
    """Runs ``copies`` child processes, numbered from 1."""

    copies: int
    #: Returns the work of a copy; called at each start, as a copy that died may have done a part.
    work: Callable[[int], Work]
    stop: threading.Event
    tell: Tell
    #: The delays of restarts; without it, a copy that dies is not started again, and has no spare.
    restart: Backoff | None = None
    #: By the monotonic clock; no copy is started after it.
    deadline: float | None = None
    _places: list[_Place] = field(init=False)
    _spare: _Place = field(init=False)

    def __post_init__(self) -> None:
        self._places = [_Place(number) for number in range(1, self.copies + 1)]
        self._spare = _Place(SPARE)

    def run(self) -> bool:
        """Run until all copies have ended; return whether one had work until its end.

        Once ``stop`` is set, each copy finishes its row, and none is started. Raises
        ``Unsupported`` where other processes could not see the rows.
        """
        databases = databases_for_children()
        try:
            while not all(place.is_over for place in self._places):
                for place in self._places:
                    if self.stop.is_set():
                        self._let_finish(place)
                    elif place.child is None and not place.is_over:
                        self._start_if_due(place, databases)
                self._start_spare_if_due(databases)
                self._receive()
        except StoppedAtOnce:
            for child in self._children():
                child.stop_at_once()
            raise
        finally:
            self._end_children()
        return any(place.had_work for place in self._places)

    def _let_finish(self, place: _Place) -> None:
        if place.child is None:
            place.is_over = True
        elif not place.is_stopping:
            place.child.send(STOP)
        place.is_stopping = True

    def _start_if_due(self, place: _Place, databases: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._is_late(now):
            place.is_over = True
        elif now < place.start_at:
            return
        elif spare := self._waiting_spare():
            self._promote_spare(place, spare)
        else:
            work = self.work(place.number)
            self._start(place, f"copy {place.number}", work, databases)

    def _waiting_spare(self) -> Child | None:
        # Not one that is loading: a copy, and a stop of it, would wait until it has loaded.
        spare = self._spare.child
        return spare if spare is not None and spare.phase is Phase.WAITING else None

    def _promote_spare(self, place: _Place, spare: Child) -> None:
        place.started = time.monotonic()
        # In this order: a signal between the two lines leaves it in both places, not in none.
        place.child = spare
        self._spare.child = None
        spare.send(Order(f"copy {place.number}", self.work(place.number)))

    def _start_spare_if_due(self, databases: dict[str, Any]) -> None:
        """Start a spare, unless a copy is loading, which is more urgent."""
        spare, now = self._spare, time.monotonic()
        is_wanted = self.restart is not None and not self.stop.is_set() and not self._is_late(now)
        is_due = spare.child is None and now >= spare.start_at
        if is_wanted and is_due and all(each.phase is Phase.WORKING for each in self._children()):
            self._start(spare, "spare", None, databases)

    def _is_late(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline

    def _start(
        self, place: _Place, name: str, work: Work | None, databases: dict[str, Any]
    ) -> None:
        place.started = time.monotonic()
        try:
            with signals_blocked():
                place.child = Child(name, work, databases)
        except OSError as error:
            sentence = f"could not be started: {describe(error)}"
            self._ended(place, Trouble(sentence, traceback.format_exc()))

    def _receive(self) -> None:
        """Wait for messages, and take one from each child that has sent any."""
        places = [*self._places, self._spare]
        running: dict[Any, Child] = {
            place.child.results: place.child for place in places if place.child is not None
        }
        for results in connection.wait(list(running), POLL_IDLE):
            child = running[results]
            # Not earlier: a death among these messages may have given the spare another place.
            place = next(each for each in places if each.child is child)
            name, event = child.receive()
            if name is not None:
                self.tell(place.number, name, event)
            elif event is Phase.WAITING:
                self.tell(SPARE, None, SpareReady(child.pid))
            elif isinstance(event, Ended | Trouble):
                place.child = None
                child.end()
                # A spare that ends before it has read its order is no copy: the place is still due.
                is_spare = child.phase is Phase.WAITING
                self._ended(self._spare if is_spare else place, event)

    def _ended(self, place: _Place, event: Ended | Trouble) -> None:
        if place is self._spare:
            # Not reported: no copy is missing, and what is wrong here will be wrong with a copy.
            self._plan_restart(place, BACKOFF)
        elif isinstance(event, Trouble):
            self._died(place, event)
        else:
            place.is_over, place.had_work = True, event.had_work

    def _died(self, place: _Place, trouble: Trouble) -> None:
        """Report a death by a signal or an unexpected error; plan the restart, if there is one."""
        # A fault of the program would end the next copy, too.
        place.had_work = not trouble.is_final
        restart = None if trouble.is_final or self.stop.is_set() else self.restart
        wait = None if restart is None else self._plan_restart(place, restart)
        place.is_over = wait is None
        self.tell(place.number, None, Died(trouble, wait))
        if wait == 0 and (spare := self._waiting_spare()):
            # At once, as another copy may have died at the same time.
            self._promote_spare(place, spare)

    def _plan_restart(self, place: _Place, restart: Backoff) -> float:
        """Return in how many seconds: 0 after a first death, if a spare waits."""
        now = time.monotonic()
        place.deaths = 1 if now - place.started >= LIVED_LONG else place.deaths + 1
        has_spare = place.deaths == 1 and self._waiting_spare() and not self._is_late(now)
        wait = 0.0 if has_spare else restart.after(place.deaths)
        place.start_at = now + wait
        return wait

    def _children(self) -> set[Child]:
        """Return the children that have not ended, the spare included."""
        places = [*self._places, self._spare]
        return {place.child for place in places if place.child is not None}

    def _end_children(self) -> None:
        if self._spare.child is not None:
            self._spare.child.stop_at_once()
        for child in self._children():
            child.end()


def databases_for_children() -> dict[str, Any]:
    """Return the databases' names by alias; close own connections until the workers have ended.

    Raises ``Unsupported`` where other processes could not see the rows.
    """
    _check_children_can_see_rows()
    connections.close_all()
    return {alias: database["NAME"] for alias, database in connections.databases.items()}


def _check_children_can_see_rows() -> None:
    if "DJANGO_SETTINGS_MODULE" not in os.environ:
        raise Unsupported(
            "expected DJANGO_SETTINGS_MODULE to name the settings, got settings made by "
            "configure(), which other processes cannot read; run one worker."
        )
    for connected in connections.all(initialized_only=True):
        if connected.in_atomic_block:
            raise Unsupported(
                f"expected no open transaction on {connected.alias!r}, got one: workers are other "
                "processes, which see only committed rows; in tests use TransactionTestCase."
            )
    for alias in connections:
        in_memory: Any = getattr(connections[alias], "is_in_memory_db", None)
        if in_memory is not None and in_memory():
            raise Unsupported(
                f"expected a database that other processes can open, got {alias!r} in this "
                "process's memory; use a file, or run one worker."
            )
