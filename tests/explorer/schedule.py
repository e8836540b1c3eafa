"""One schedule: the actors move one by one, from the first step of one to the last of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from .actors import Actor
from .control import Control
from .search import Chooser
from .steps import Step

#: Seconds without a sign of an actor until the server is asked whether it waits for a lock.
LOOK = 0.005
#: Seconds until a schedule is given up.
PATIENCE = 60.0


class Violation(AssertionError):
    """A schedule ended in what must not be."""


@dataclass
class Told:
    """What has happened in a schedule, in its order."""

    moves: list[tuple[Actor, Step]] = field(default_factory=list)
    #: The choices, by which the schedule can be run again.
    digits: str = ""

    def __str__(self) -> str:
        """Draw one column for each actor."""
        actors = sorted({actor.number: actor.name for actor, _ in self.moves}.items())
        width = 2 + max((len(str(step)) for _, step in self.moves), default=0)
        lines = ["".join(f"{name:{width}}" for _, name in actors)]
        places = {number: place for place, (number, _) in enumerate(actors)}
        lines += [" " * width * places[actor.number] + str(step) for actor, step in self.moves]
        return "\n".join(line.rstrip() for line in lines)


class Schedule:
    """Runs one; ``after`` is called after each move, and may object."""

    def __init__(
        self,
        actors: Sequence[Actor],
        came: SimpleQueue[Actor],
        control: Control,
        chooser: Chooser,
        after: Callable[[Actor, Step], None],
    ) -> None:
        self.told = Told()
        self._actors, self._came = actors, came
        self._control, self._chooser, self._after = control, chooser, after
        self._moving: set[Actor] = set()
        self._waiting: dict[int, Actor] = {}
        self._blocked: set[Actor] = set()

    def run(self, jobs: Sequence[Callable[[], Any]]) -> Told:
        """Run a job for each of the first actors; the others are to be begun by these.

        Raises ``Violation``, and what the chooser raises.
        """
        for actor, job in zip(self._actors, jobs, strict=False):
            self._moving.add(actor)
            actor.begin(job, watched=True)
        try:
            self._until_all_wait()
            while ready := self._ready():
                number = self._pick(ready)
                actor, step = self._waiting[number], self._step(number)
                self.told.moves.append((actor, step))
                self._move(actor)
                self._until_all_wait()
                self._after(actor, step)
            if self._moving or self._waiting:
                raise Violation(f"{self._names()} wait for each other")
        finally:
            self._let_run_out()
        return self.told

    def join_in(self, actor: Actor) -> None:
        """Add an actor that another one lets begin."""
        self._moving.add(actor)

    def _ready(self) -> dict[int, Step]:
        self._throw_dice()
        ready = sorted(number for number, each in self._waiting.items() if each.ready())
        return {number: self._step(number) for number in ready}

    def _step(self, number: int) -> Step:
        step = self._waiting[number].step
        assert step is not None
        return step

    def _pick(self, options: Mapping[int, Step | None]) -> int:
        chosen = self._chooser.pick(options)
        self.told.digits += str(chosen)
        return chosen

    def _throw_dice(self) -> None:
        while thrown := [each for each in sorted(self._waiting) if self._step(each).choices]:
            sides = self._step(thrown[0]).choices
            self._move(self._waiting[thrown[0]], self._pick(dict.fromkeys(range(sides))))
            self._until_all_wait()

    def _move(self, actor: Actor, answer: Any = None) -> None:
        del self._waiting[actor.number]
        self._moving.add(actor)
        actor.move(answer)

    def _until_all_wait(self) -> None:
        """Wait until every actor is at a point or at its end, or the database makes it wait."""
        end = time.monotonic() + PATIENCE
        while self._moving or self._bury():
            # Who was blocked is so until a lock is let go, and that has happened by now.
            if self._moving <= self._blocked and all(map(self._is_blocked, self._moving)):
                return
            try:
                actor = self._came.get(timeout=LOOK)
            except Empty:
                self._blocked = {each for each in [*self._moving] if self._is_blocked(each)}
                if time.monotonic() > end:
                    raise Violation(f"{self._names()} did not come to an end") from None
                continue
            self._take_note(actor)

    def _take_note(self, actor: Actor) -> None:
        """See where an actor has come to; one that has died comes from wherever it was."""
        self._moving.discard(actor)
        self._blocked.discard(actor)
        self._waiting.pop(actor.number, None)
        if actor.step is not None:
            self._waiting[actor.number] = actor

    def _bury(self) -> bool:
        """Let the actors whose process is gone run to their end; return whether there are any."""
        dead = [each for each in self._waiting.values() if each.is_dead]
        for each in dead:
            self._move(each)
        return bool(dead)

    def _is_blocked(self, actor: Actor) -> bool:
        # Looked at first: it may get the lock and come to its next step while the server is asked.
        step = actor.step
        # Any other session, such as autovacuum's, holds its lock for a moment only.
        others = {each.pid for each in self._actors}
        blockers = others.intersection(self._control.blockers(actor.pid))
        if blockers and step is not None and not step.may_wait:
            raise Violation(f"{actor.name} waits for another one's lock at: {step}")
        return bool(blockers)

    def _names(self) -> str:
        return " and ".join(sorted(actor.name for actor in self._moving))

    def _let_run_out(self) -> None:
        """Let the actors run on without the schedule, so that the next schedule begins afresh."""
        for actor in self._actors:
            actor.watched = False
        end = time.monotonic() + PATIENCE
        while self._moving or self._waiting:
            for actor in [each for each in self._waiting.values() if each.ready()]:
                self._move(actor)
            assert time.monotonic() < end, f"{self._names()} did not come to an end"
            try:
                actor = self._came.get(timeout=1)
            except Empty:
                continue
            self._take_note(actor)
