"""Where schedules are run: the actors, the rows, and what is deterministic only here."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from dcl_processor import Report
from tests import seams

from .actors import Actor, cast_of, die, here
from .audit import Audit
from .control import CLOCK_SET_BACK, Control
from .leases import Clock, Hands
from .schedule import Schedule, Told, Violation
from .search import After, Chooser, Dice, Parts, Pruned, Search, Written
from .steps import Step
from .subjects import EDITOR, FIRST, Subject, edit

#: What each search may take that is not run whole otherwise (``make explore``).
SECONDS = float(os.environ.get("SECONDS") or 0)
TIME, DEATH = "time", "death"
TABLES = "tests_errand, tests_parcel, tests_receipt"
#: Schedules between two sweeps of the rows' old versions, which would make each later one slower.
SWEEP = 500


@dataclass
class Count:
    """What was explored."""

    subject: str
    schedules: int = 0
    #: Runs that were broken off: what they would have come to was tried already.
    pruned: int = 0
    moves: int = 0
    seconds: float = 0.0
    longest: int = 0
    outcomes: set[Any] = field(default_factory=set)
    #: Whether these are all that there are.
    whole: bool = False

    def __str__(self) -> str:
        speed = self.schedules / self.seconds if self.seconds else 0
        return (
            f"{self.subject}: {'all ' * self.whole}{self.schedules} schedules "
            f"(up to {self.longest} steps), {self.moves} steps in all, {self.pruned} broken off, "
            f"{self.seconds:.1f} s, {speed:.0f}/s"
        )


class Stage:
    """One subject, so many workers, and so many rows."""

    def __init__(
        self, subject: Subject, workers: int, actors: list[Actor], came: Any, control: Control
    ) -> None:
        self.subject = subject
        self.rows: list[int] = []
        self.count = Count(subject.name)
        self.clock = Clock()
        self._actors, self._workers = actors, actors[:workers]
        self._came, self._control = came, control
        self._schedule: Schedule | None = None

    def have(self, rows: int, *, every_statement: bool) -> None:
        """Make the rows, and let each copy run once, so that its session has been asked all."""
        self.rows = [FIRST + number for number in range(rows)]
        self.subject.make(self.rows)
        for actor in self._actors:
            actor.rows, actor.every_statement = frozenset(self.rows), every_statement
        for copy in self._workers:
            self._alone(copy)
            self._set_back()

    def explore(self, *, reduced: bool = True, most: float = math.inf, after: Parts = ()) -> Count:
        """Run every schedule, or so many, or for ``SECONDS``; ``whole`` says which.

        ``after``: how they all begin.
        """
        search, end = Search(reduced=reduced), math.inf
        if SECONDS and most < math.inf:
            most, end = math.inf, time.monotonic() + SECONDS
        while time.monotonic() < end and self.count.schedules + self.count.pruned < most:
            self._run(After(after, search))
            if not search.go_on():
                self.count.whole = True
                break
        return self._shown()

    def sample(self, times: int, *, by: Callable[[int], Chooser] = Dice) -> Count:
        """Run so many random schedules, or more of them, each by a seed of its own."""
        end = time.monotonic() + SECONDS / 10
        for seed in count():
            if seed >= times and time.monotonic() > end:
                break
            self._run(by(seed))
        return self._shown()

    def _shown(self) -> Count:
        if SECONDS:
            print(f"\n{len(self._workers)} workers, {len(self.rows)} rows: {self.count}")
        return self.count

    def replay(self, digits: str) -> Told | None:
        return self._run(Written(digits))

    def _run(self, chooser: Chooser) -> Told | None:
        began = time.monotonic()
        self._set_back()
        audit = Audit(self.subject, self.rows, self._control, self._workers[0])
        schedule = Schedule(self._actors, self._came, self._control, chooser, audit.after)
        self._schedule = schedule
        victims = [each for each in self._actors if each.of == 0]
        others = {TIME: self.clock.lapse, EDITOR: edit, DEATH: partial(die, self._control, victims)}
        jobs: list[Any] = [others.get(each.name, self.subject.run) for each in self._begin]
        try:
            told = schedule.run(jobs)
            reports = self._reports()
            self._judge(audit, reports)
        except Pruned:
            self.count.pruned += 1
            return None
        except AssertionError as error:
            error.add_note(f"\n{schedule.told}\n\n{self._how_to_replay(schedule.told)}")
            raise
        finally:
            self.count.seconds += time.monotonic() - began
        self._note(told, audit, reports)
        return told

    def join_in(self, actor: Actor) -> None:
        """Add an actor that another one lets begin."""
        assert self._schedule is not None
        self._schedule.join_in(actor)

    def is_free(self, copy: Actor) -> bool:
        """Return whether no other actor has a lock of the rows."""
        others = [each for each in self._actors if each is not copy]
        return not any(each.has_locked(row) for each in others for row in self.rows)

    @property
    def _begin(self) -> list[Actor]:
        return [each for each in self._actors if each.of == each.number]

    def _reports(self) -> list[Report]:
        for actor in self._actors:
            if actor.error is not None and not actor.is_dead:
                raise Violation(f"{actor.name} ended with {actor.error!r}") from actor.error
        return [copy.result for copy in self._workers if copy.error is None]

    def _judge(self, audit: Audit, reports: list[Report]) -> None:
        left = audit.at_the_end(reports)
        if left:
            if audit.dead or audit.time_has_passed:
                self.clock.let_pass(self._control.ask)
            audit.after_a_last_run(left, self._alone(self._workers[0]))

    def _alone(self, copy: Actor) -> Any:
        copy.begin(self.subject.run, watched=False)
        while self._came.get(timeout=60) is not copy:
            pass
        if copy.error is not None:
            raise copy.error
        return copy.result

    def _set_back(self) -> None:
        runs = self.count.schedules + self.count.pruned
        if runs % SWEEP == SWEEP - 1:
            self._control.ask(f"VACUUM {TABLES}")
        self._control.ask(f"{self.subject.set_back}; {CLOCK_SET_BACK}")
        self.clock.set_back()

    def _note(self, told: Told, audit: Audit, reports: list[Report]) -> None:
        self.count.schedules += 1
        self.count.moves += len(told.moves)
        self.count.longest = max(self.count.longest, len(told.moves))
        figures = [
            (report.processed, report.skipped, report.stale, report.lease_lost)
            for report in reports
        ]
        self.count.outcomes.add((*figures, *sorted(audit.handled.items())))

    def _how_to_replay(self, told: Told) -> str:
        every = ":every" if self._workers[0].every_statement else ""
        size = f"{len(self._workers)}x{len(self.rows)}{every}"
        others = self._actors[len(self._workers) :]
        more = "".join(each.name[0] if each.beats < 2 else "H" for each in others)
        return (
            f"Again: EXPLORE={self.subject}:{size}{more and f'+{more}'}:{told.digits} make explore"
        )


@contextmanager
def staged(
    subject: Subject,
    *,
    workers: int = 2,
    rows: int = 1,
    lapse: bool = False,
    dies: bool = False,
    edited: bool = False,
    hearts: int = 0,
    beats: int = 1,
    every_statement: bool = False,
) -> Iterator[Stage]:
    """Have a stage.

    ``lapse``: there is an actor who lets every lease lapse, once; ``dies``: one who ends the
    process of the first worker; ``edited``: one who makes the first row pending again, once;
    ``hearts``: so many workers have one, which beats so often;
    ``every_statement``: also statements that no other copy can see are steps.
    """
    names = [f"copy {letter}" for letter in "ABCD"[:workers]]
    names += [*[TIME] * lapse, *[EDITOR] * edited, *[DEATH] * dies]
    with (
        Control() as control,
        cast_of(names, control, range(hearts)) as (actors, came),
        _deterministic(chooses=subject.chooses),
    ):
        stage = Stage(subject, workers, actors, came, control)
        for heart in actors[len(names) :]:
            heart.beats = beats
        hands = Hands(actors[len(names) :], stage.clock, stage.join_in, stage.is_free)
        with hands.holding():
            stage.have(rows, every_statement=every_statement)
            yield stage


@contextmanager
def _deterministic(*, chooses: bool) -> Iterator[None]:
    """Let the schedule say where a copy goes on that has met another one."""
    with pytest.MonkeyPatch.context() as patch:
        if chooses:
            seams.replace(patch, seams.AMONG_OTHERS, True)
        for seam in seams.PLACES:
            seams.replace(patch, seam, SimpleNamespace(randbelow=_randbelow))
        seams.replace(patch, seams.TURNS, lambda: 0.0)
        yield


def _randbelow(sides: int) -> int:
    # A die, whose sides are tried one after the other.
    return int(here().point(Step("die", choices=sides)) or 0) if sides > 1 else 0
