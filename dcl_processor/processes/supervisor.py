"""The supervisor: starts worker processes (copies), and waits until all of them have ended.

A copy that dies costs the others nothing. With ``restart`` it is started again. The pattern is the
supervisor of Erlang/OTP, and of every service manager: let a worker crash, and restart it with a
growing delay, so that a poison row, which kills its worker, keeps no worker busy.
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
from dcl_processor.watch.polling import POLL_IDLE, Backoff
from dcl_processor.watch.watch import Event

from .child import STOP, Child, Ended, Work, signals_blocked
from .graceful_stop import StoppedAtOnce

#: A copy that has lived for this many seconds is restarted as if it had never died before.
LIVED_LONG = 60.0


@dataclass(frozen=True, slots=True)
class Died:
    """A copy has died, or did not start; ``wait``: seconds until its restart, ``None``: none."""

    trouble: Trouble
    wait: float | None

    def __str__(self) -> str:
        again = "" if self.wait is None else f"; it is started again in {self.wait:.1f} s"
        return f"{self.trouble.sentence}{again}"


News = Event | Died

#: Takes a copy's number, a processor's name (``None``: the copy itself), and what happened to it.
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
    #: The delays of restarts; without it, a copy that dies is not started again.
    restart: Backoff | None = None
    #: By the monotonic clock; no copy is started after it.
    deadline: float | None = None
    _places: list[_Place] = field(init=False)

    def __post_init__(self) -> None:
        self._places = [_Place(number) for number in range(1, self.copies + 1)]

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
                self._receive()
        except StoppedAtOnce:
            for child in self._children():
                child.stop_at_once()
            raise
        finally:
            for child in self._children():
                child.end()
        return any(place.had_work for place in self._places)

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
        elif now >= place.start_at:
            place.started = now
            work = self.work(place.number)
            try:
                with signals_blocked():
                    place.child = Child(f"copy {place.number}", work, databases)
            except OSError as error:
                sentence = f"could not be started: {describe(error)}"
                self._died(place, Trouble(sentence, traceback.format_exc()))

    def _receive(self) -> None:
        """Wait for messages, and take one from each copy that has sent any."""
        running: dict[Any, tuple[_Place, Child]] = {
            place.child.results: (place, place.child)
            for place in self._places
            if place.child is not None
        }
        for results in connection.wait(list(running), POLL_IDLE):
            place, child = running[results]
            name, event = child.receive()
            if name is not None:
                self.tell(place.number, name, event)
            elif isinstance(event, Ended | Trouble):
                place.child = None
                child.end()
                if isinstance(event, Trouble):
                    self._died(place, event)
                else:
                    place.is_over, place.had_work = True, event.had_work

    def _died(self, place: _Place, trouble: Trouble) -> None:
        """Report a death by a signal or an unexpected error; plan the restart, if there is one."""
        lived = time.monotonic() - place.started
        place.deaths = 1 if lived >= LIVED_LONG else place.deaths + 1
        # A fault of the program would end the next copy, too.
        place.had_work = not trouble.is_final
        restart = None if trouble.is_final or place.is_stopping else self.restart
        wait = None if restart is None else restart.after(place.deaths)
        place.is_over = wait is None
        place.start_at = time.monotonic() + (wait or 0)
        self.tell(place.number, None, Died(trouble, wait))

    def _children(self) -> list[Child]:
        return [place.child for place in self._places if place.child is not None]


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
