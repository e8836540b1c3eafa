"""The supervisor: starts worker processes, and waits until all of them have ended.

A worker that dies costs the others nothing. With ``restart`` it is started again. The pattern is
the supervisor of Erlang/OTP, and of every service manager: let a worker crash, and restart it at
once the first time, and then with a growing delay, so that a poison row, which kills its worker,
keeps no worker busy.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from django.db import DatabaseError, connections

from dcl_processor import steady as time
from dcl_processor.database.sight import refuse_others, sight, tenant_of
from dcl_processor.diagnosis import Trouble, describe
from dcl_processor.exceptions import Unsupported
from dcl_processor.execution.in_flight import note_killed
from dcl_processor.report import Report
from dcl_processor.watch.polling import POLL_IDLE, Backoff

from .beats import Beat
from .child import (
    SOON,
    STOP,
    Child,
    Ended,
    Phase,
    Work,
    end_all,
    exit_codes_kept,
    is_program,
    signals_blocked,
)
from .graceful_stop import StoppedAtOnce
from .monitor import Lateness, OwnTime
from .news import Died, Finishing, Observe, Tell, Worker

#: Seconds between two reports of the workers to ``observe``.
OBSERVED_EVERY = 0.2

#: A worker that has lived for this many seconds is restarted as if it had never died before.
LIVED_LONG = 60.0


@dataclass(slots=True)
class _Place:
    """One worker after the other, under one number."""

    number: int
    child: Child | None = None
    #: When the next worker starts, and when the last one did, by the monotonic clock.
    start_at: float = 0.0
    started: float = 0.0
    deaths: int = 0
    is_stopping: bool = False
    is_over: bool = False
    #: Whether the last worker had work until its end.
    had_work: bool = True
    #: What the supervisor knows of the child.
    lateness: Lateness = field(default_factory=lambda: Lateness(None, 0.0))
    has_said: bool = False
    #: Whether a run has reported its end; a watch reports that of each of its runs.
    has_reported: bool = False
    #: A process that was killed and did not end.
    left_behind: int | None = None


@dataclass(slots=True)
class Supervisor:
    """Runs ``workers`` child processes, numbered from 1."""

    workers: int
    #: Returns a worker's work; called at each start, as a worker that died may have done a part.
    work: Callable[[int], Work]
    stop: threading.Event
    tell: Tell
    #: The delays of restarts, from the second one in a while on; without it, a worker that dies is
    #: not started again.
    restart: Backoff | None = None
    #: By the monotonic clock; no worker is started after it.
    deadline: float | None = None
    #: The longest ``handler_timeout`` of the processors; without it, none is killed for silence.
    limit: float | None = None
    #: Whether a worker that was killed for a row is started again, even without ``restart``; at
    #: once, and only if no worker was killed for this row before.
    goes_on: bool = False
    #: Called several times a second with the state of each worker that is not over.
    observe: Observe = lambda _: None
    _places: list[_Place] = field(init=False)
    _time: OwnTime = field(default_factory=OwnTime)
    _observed: float = -1.0
    _killed_for: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._places = [_Place(number) for number in range(1, self.workers + 1)]

    def run(self) -> bool:
        """Run until all workers have ended; return whether one had work until its end.

        Once ``stop`` is set, each worker finishes its row, and none is started. Raises
        ``Unsupported`` where other processes could not see the rows.
        """
        databases = databases_for_children()
        with exit_codes_kept():
            self._run(databases)
        return any(place.had_work for place in self._places)

    def _run(self, databases: dict[str, Any]) -> None:
        self._time.pass_()
        try:
            while not all(place.is_over for place in self._places):
                for place in self._places:
                    if self.stop.is_set():
                        self._let_finish(place)
                    elif place.child is None and not place.is_over:
                        self._start_if_due(place, databases)
                self._receive()
                now = self._time.pass_()
                self._kill_late_ones(now)
                self._take_leave(now)
                self._report()
        except StoppedAtOnce:
            for child in self._children():
                child.stop_at_once()
            raise
        finally:
            end_all(self._children(), self._time)

    def _let_finish(self, place: _Place) -> None:
        if place.child is None:
            place.is_over = True
        elif not place.is_stopping:
            place.child.send(STOP)
        place.is_stopping = True

    def _start_if_due(self, place: _Place, databases: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.deadline is not None and now >= self.deadline:
            place.is_over = True
        elif now < place.start_at:
            return
        else:
            self._start(place, databases)

    def _start(self, place: _Place, databases: dict[str, Any]) -> None:
        place.started = time.monotonic()
        try:
            with signals_blocked():
                place.child = Child(place.number, self.work(place.number), databases)
                place.lateness = Lateness(self.limit, self._time.seconds)
        except OSError as error:
            sentence = f"could not be started: {describe(error)}"
            self._ended(place, Trouble(sentence, traceback.format_exc()))

    def _receive(self) -> None:
        """Wait for messages, and take those that each child has sent."""
        children = self._children()
        running = [child.results for child in children if not child.is_ending]
        pause = POLL_IDLE if len(running) == len(children) else SOON
        ready = connection.wait(running, pause)
        for place in self._places:
            child = place.child
            if child is None or child.results not in ready:
                continue
            for name, event in child.receive(self._time.seconds):
                place.lateness.hear(self._time.seconds)
                if name is not None:
                    place.has_reported |= isinstance(event, Report | Trouble)
                    self.tell(place.number, name, event)

    def _name_last_rows(self, place: _Place, beat: Beat) -> None:
        if beat.is_stopping and beat.call is not None and self.stop.is_set() and not place.has_said:
            place.has_said = True
            self.tell(place.number, None, Finishing(beat.call))

    def _kill_late_ones(self, now: float) -> None:
        """Kill the workers whose handlers did not end, or that do not move; ``now``: own time."""
        for place in self._places:
            child, lateness = place.child, place.lateness
            if child is None or child.is_ending:
                continue
            if beat := child.last_beat():
                lateness.hear(now, beat)
                self._name_last_rows(place, beat)
            if why := lateness.fault(now, child.pid):
                note_killed(child.pid)
                child.kill(why, now)
                lateness.killed_at = now

    def _take_leave(self, now: float) -> None:
        """Free the places of the children that have gone; ``now``: own time."""
        for place in self._places:
            child = place.child
            if child is None or not child.has_gone(now):
                continue
            place.child = None
            place.left_behind = child.pid if child.is_left_behind else None
            outcome = child.outcome()
            child.close()
            self._ended(place, outcome)

    def _ended(self, place: _Place, event: Ended | Trouble) -> None:
        if isinstance(event, Trouble):
            self._died(place, event)
        else:
            place.is_over, place.had_work = True, event.had_work

    def _died(self, place: _Place, trouble: Trouble) -> None:
        """Report a death by a signal or an unexpected error; plan the restart, if there is one."""
        # A fault of the program would end the next worker, too.
        place.had_work = not trouble.is_final
        is_last = trouble.is_final or self.stop.is_set() or place.left_behind is not None
        wait = None
        if not is_last and self.restart is not None:
            wait = self._plan_restart(place, self.restart)
        # A worker that has reported the end of its run has no row left for a successor, whose
        # report would take the place of its own.
        may_go_on = not is_last and self.goes_on and not place.has_reported
        if may_go_on and self._was_killed_for_a_new_row(place):
            wait = 0.0
        place.is_over = wait is None
        # That it was killed for its row is in the sentence already.
        call = place.lateness.call if place.lateness.killed_at is None else None
        self.tell(place.number, None, Died(trouble, wait, call))

    def _was_killed_for_a_new_row(self, place: _Place) -> bool:
        call = place.lateness.call
        # An unknown row counts as new once: the first such kill is followed by a restart, a second
        # one is not.
        rows = None if call is None else (call.keys, call.identity)
        if place.lateness.killed_at is None or rows in self._killed_for:
            return False
        self._killed_for.add(rows)
        return True

    def _plan_restart(self, place: _Place, restart: Backoff) -> float:
        """Return in how many seconds: 0 after a first death."""
        now = time.monotonic()
        place.deaths = 1 if now - place.started >= LIVED_LONG else place.deaths + 1
        wait = restart.after(place.deaths) if place.deaths > 1 else 0.0
        place.start_at = now + wait
        return wait

    def _children(self) -> set[Child]:
        """Return the children that have not ended."""
        return {place.child for place in self._places if place.child is not None}

    def _report(self) -> None:
        now = self._time.seconds
        if now - self._observed >= OBSERVED_EVERY:
            self._observed = now
            self.observe([each for place in self._places for each in _workers(place, now)])


def _workers(place: _Place, now: float) -> Iterator[Worker]:
    """Yield the worker at this place, unless it has ended."""
    child, lateness = place.child, place.lateness
    if place.left_behind is not None:
        pid = place.left_behind
        yield Worker(place.number, pid, "cannot be killed", lateness.call, is_alive=False)
    elif child is not None and child.is_ending:
        yield Worker(place.number, child.pid, "ends", None, is_alive=True)
    elif child is not None:
        working = "works" if lateness.call else "waits"
        state = "loads" if child.phase is not Phase.WORKING else working
        shown = "does not move" if lateness.is_silent(now) else state
        yield Worker(place.number, child.pid, shown, lateness.call, lateness.is_alive(now))
    elif not place.is_over:
        yield Worker(place.number, None, "waits to be started", None, is_alive=True)


# --- what child processes need of the databases: their names, and that they can see the rows


def databases_for_children() -> dict[str, Any]:
    """Return the databases' names by alias; close own connections until the workers have ended.

    Raises ``Unsupported`` where other processes could not see the rows.
    """
    check_children_can_see_rows()
    connections.close_all()
    return {alias: database["NAME"] for alias, database in connections.databases.items()}


def check_children_can_see_rows() -> None:
    """Raise ``Unsupported`` where other processes could not see the rows."""
    if "DJANGO_SETTINGS_MODULE" not in os.environ and not is_program():
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
        with suppress(DatabaseError):  # a server that is away is the children's own matter
            _check_sight(connected)
    for alias in connections:
        in_memory: Any = getattr(connections[alias], "is_in_memory_db", None)
        if in_memory is not None and in_memory():
            raise Unsupported(
                f"expected a database that other processes can open, got {alias!r} in this "
                "process's memory; use a file, or run one worker."
            )


def _check_sight(connected: Any) -> None:
    """Raise ``Unsupported`` if a new session would see other rows than the one that is open."""
    if connected.connection is None and not tenant_of(connected):
        return
    fresh: Any = connected.copy()
    fresh.settings_dict["OPTIONS"].pop("pool", None)  # this process may have all of its sessions
    with closing(fresh):
        refuse_others(sight(connected), fresh)
