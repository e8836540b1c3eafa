"""The supervisor: starts worker processes, and waits until all of them have ended.

A worker that dies costs the others nothing. With ``restarts`` it is started again. The pattern is
the supervisor of Erlang/OTP, and of every service manager: let a worker crash, and restart it at
once the first time, and then with a growing delay, so that a poison row, which kills its worker,
keeps no worker busy.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from django.db import DatabaseError, connections

from dcl_processor.exceptions import Unsupported
from dcl_processor.operator.diagnosis import Trouble, describe
from dcl_processor.operator.times import backoff
from dcl_processor.pending import steady as time
from dcl_processor.watch.watch import POLL_IDLE

from .child import SOON, Child, Work, is_program, signals_blocked
from .graceful_stop import StoppedAtOnce
from .monitor import PACE, OwnTime
from .news import Died, Observe, Tell, Worker

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
    is_over: bool = False
    #: Whether the last worker had work until its end.
    had_work: bool = True


@dataclass(slots=True)
class Supervisor:
    """Runs ``workers`` child processes, numbered from 1."""

    workers: int
    #: Returns a worker's work; called at each start, as a worker that died may have done a part.
    work: Callable[[int], Work]
    stop: threading.Event
    tell: Tell
    #: Whether each worker that dies is started again. Otherwise only one that was killed for a row
    #: is: at once, if no worker was killed for this row before.
    restarts: bool = False
    #: By the monotonic clock; no worker is started after it.
    deadline: float | None = None
    #: The longest ``handler_timeout`` of the processors; without it, none is killed for silence.
    limit: float | None = None
    #: Called in each ``pace`` (seconds) with the state of each worker that is not over.
    observe: Observe = lambda _: None
    pace: float = PACE
    _places: list[_Place] = field(init=False)
    _time: OwnTime = field(default_factory=OwnTime)
    _observed: float = -math.inf
    _killed_for: set[object] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._places = [_Place(number) for number in range(1, self.workers + 1)]

    def run(self) -> bool:
        """Run until all workers have ended; return whether one had work until its end.

        Once ``stop`` is set, each worker finishes its row, and none is started. Raises
        ``Unsupported`` where other processes could not see the rows.
        """
        databases = databases_for_children()
        self._time.pass_()
        try:
            while not all(place.is_over for place in self._places):
                for place in self._places:
                    self._start_or_stop(place, databases)
                self._receive()
                now = self._time.pass_()
                for place in self._places:
                    self._look_at(place, now)
                self._report(now)
        except StoppedAtOnce:
            for child in self._children():
                child.stop_at_once()
            raise
        finally:
            self._end_all()
        return any(place.had_work for place in self._places)

    def _start_or_stop(self, place: _Place, databases: dict[str, Any]) -> None:
        now = time.monotonic()
        if place.child is not None:
            if self.stop.is_set():
                place.child.stop()
        elif self.stop.is_set() or (self.deadline is not None and now >= self.deadline):
            place.is_over = True
        elif not place.is_over and now >= place.start_at:
            self._start(place, databases)

    def _start(self, place: _Place, databases: dict[str, Any]) -> None:
        place.started = time.monotonic()
        number, work = place.number, self.work(place.number)
        try:
            with signals_blocked():
                place.child = Child(number, work, databases, self.limit, self._time.seconds)
        except OSError as error:
            sentence = f"could not be started: {describe(error)}"
            self._died(place, Trouble(sentence, traceback.format_exc()))

    def _receive(self) -> None:
        """Wait for messages, and take those that each child has sent."""
        children = self._children()
        running = [child.pipe for child in children if not child.is_ending]
        pause = POLL_IDLE if len(running) == len(children) else SOON
        ready = connection.wait(running, pause)
        for place in self._places:
            child = place.child
            if child is None or child.pipe not in ready:
                continue
            for name, event in child.receive(self._time.seconds):
                if name is not None:
                    self.tell(place.number, name, event)

    def _look_at(self, place: _Place, now: float) -> None:
        """Kill a child that does not move, and free the place of one that has gone."""
        if (child := place.child) is None:
            return
        child.kill_if_silent(now)
        if not child.has_gone(now):
            return
        place.child, outcome = None, child.outcome()
        if isinstance(outcome, Trouble):
            self._died(place, outcome, child)
        else:
            place.is_over, place.had_work = True, outcome.had_work

    def _died(self, place: _Place, trouble: Trouble, child: Child | None = None) -> None:
        """Report a death by a signal or an unexpected error; plan the restart, if there is one."""
        # A fault of the program would end the next worker, too.
        place.had_work = not trouble.is_final
        wait = None
        if not trouble.is_final and not self.stop.is_set():
            wait = self._wait(place, child)
        place.is_over = wait is None
        # That it was killed for its row is in the sentence already.
        call = None if child is None or child.was_late else child.life.beat.call
        self.tell(place.number, None, Died(trouble, wait, call))

    def _wait(self, place: _Place, child: Child | None) -> float | None:
        """Return in how many seconds a successor starts, if one does: 0 after a first death."""
        if not self.restarts:
            # A worker that has reported the end of its run has no row left for a successor, whose
            # report would take the place of its own.
            if child is None or not child.was_late or child.has_reported:
                return None
            # An unknown row counts as new once.
            call = child.life.beat.call
            rows = call and (call.keys, call.number)
            is_new = rows not in self._killed_for
            self._killed_for.add(rows)
            return 0.0 if is_new else None
        now = time.monotonic()
        place.deaths = 1 if now - place.started >= LIVED_LONG else place.deaths + 1
        wait = backoff(place.deaths) if place.deaths > 1 else 0.0
        place.start_at = now + wait
        return wait

    def _children(self) -> list[Child]:
        """Return the children that have not ended."""
        return [place.child for place in self._places if place.child is not None]

    def _end_all(self) -> None:
        """Wait until the children that are left have ended, all of them in the same seconds."""
        left = self._children()
        for child in left:
            child.begin_end(self._time.pass_())
        while left := [child for child in left if not child.has_gone(self._time.pass_())]:
            time.sleep(SOON)

    def _report(self, now: float) -> None:
        if now - self._observed >= self.pace:
            self._observed = now
            self.observe([each for place in self._places for each in _workers(place, now)])


def _workers(place: _Place, now: float) -> Iterator[Worker]:
    """Yield the worker at this place, unless it has ended."""
    child = place.child
    if child is None:
        if not place.is_over:
            yield Worker(place.number, None, "waits to be started", None, is_alive=True)
        return
    life, call = child.life, child.life.beat.call
    if child.is_ending:
        state, call = "ends", None
    elif life.is_silent(now):
        state = "does not move"
    elif not life.is_loaded:
        state = "loads"
    else:
        state = "works" if call else "waits"
    yield Worker(place.number, child.pid, state, call, child.is_alive(now))


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
    """Raise ``Unsupported`` if a new session would see other tables than the one that is open."""
    # A tenant of django-tenants is chosen with the first cursor.
    has_settings = connected.connection is not None or hasattr(connected, "set_tenant")
    if connected.vendor != "postgresql" or not has_settings:
        return
    fresh: Any = connected.copy()
    fresh.settings_dict["OPTIONS"].pop("pool", None)  # this process may have all of its sessions
    with closing(fresh):
        if _sight(connected) != _sight(fresh):
            raise Unsupported(
                f"expected workers to see what the session on {connected.alias!r} sees, got "
                "another search_path or role; set these by OPTIONS or connection_created, or run "
                "one worker."
            )


def _sight(connected: Any) -> Any:
    with connected.cursor() as cursor:
        cursor.execute("SELECT current_setting('search_path'), current_user")
        return cursor.fetchone()
