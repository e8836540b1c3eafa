"""The passes of a run: each candidate is visited once, and come back to while others hold it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from dcl_processor.candidates import pending, windows
from dcl_processor.delivery.batch import Outcomes
from dcl_processor.locking.claiming import Miss
from dcl_processor.report import Stopped

from .budget import Budget
from .crew import Crew
from .patience import Patience
from .tally import Tally

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000


class Run(Protocol):
    """What the passes need of the run that they belong to."""

    processor: Definition[Any]
    budget: Budget
    tally: Tally
    crew: Crew
    stopped: Stopped | None

    def ask(self) -> pending.Question[Any]:
        """Ask the user's question afresh."""
        raise NotImplementedError

    def must_stop(self) -> bool:
        """Ask, before each batch, whether it may start."""
        raise NotImplementedError


class Passes:
    """Keeps the rows of one run apart: tried, under way, missed, and held by others."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._locked: list[Any] = []
        self._absent: list[Any] = []
        self._tried: set[Any] = set()
        self._under_way: set[Any] = set()

    def first(self) -> None:
        """Visit every candidate once."""
        self._run.tally.passes += 1
        patience = Patience(endless=self._run.processor.strict_order)
        walk = windows.Walk(self._run.ask, self._tried)
        in_order = windows.walk_in_order(self._run.ask, self._tried)
        for question, pks in in_order if self._run.processor.strict_order else walk:
            waiting = deque(pk for pk in pks if pk not in self._under_way)
            patience.begin(alone=not walk.among_others)
            while waiting and not self._run.must_stop():
                if patience.ends(*self._visit(question, waiting)):
                    walk.met_another()
                    break
            if len(self._absent) >= windows.WINDOW:
                self._look_at_absent(question)
            if self._run.stopped:
                break
        left: deque[Any] = deque()
        self.take(self._run.crew.ended(everything=True), left)
        # Only a run that is to stop leaves rows of a batch behind, though it be the last one.
        if left and not self._run.stopped:
            self._run.must_stop()
        if self._absent:
            self._look_at_absent(self._run.ask())

    def later(self) -> None:
        """Come back to the rows that others had locked, and to no others."""
        waits = self._run.budget.waits()
        while self._locked and not self._run.must_stop() and next(waits, False):
            self._run.tally.passes += 1
            waiting, self._locked = deque(self._locked), []
            while waiting:
                question = self._run.ask()
                while waiting and len(self._absent) < windows.WINDOW and not self._run.must_stop():
                    self._visit(question, waiting)
                self.take(self._run.crew.ended(everything=True), waiting)
                self._look_at_absent(question)
                if self._run.must_stop():
                    self._locked += waiting
                    break
        if self._locked:
            self._run.must_stop()
        self._run.tally.counts["skipped"] += len(self._locked)

    def _visit(self, question: pending.Question[Any], waiting: deque[Any]) -> tuple[bool, bool]:
        """Hand out the next batch, and take those that have ended.

        Tells whether any row of these was got, and whether any was missed.
        """
        tried = self._run.tally.handled + self._run.crew.rows_under_way
        size = min(self._run.budget.clip(self._run.crew.room, tried), len(waiting))
        if size:
            batch = [waiting.popleft() for _ in range(size)]
            # Now, and not when it ends: the next window may be read before that.
            self._tried.update(batch)
            self._under_way.update(batch)
            self._run.crew.begin(question, batch)
        # Without room for a row the limit may be reached, or not, when those have ended.
        return self.take(self._run.crew.ended(everything=not size), waiting)

    def take(
        self, ended: Iterable[tuple[Sequence[Any], Outcomes]], waiting: deque[Any] | None = None
    ) -> tuple[bool, bool]:
        """Count the batches that have ended; what they did not reach waits again."""
        got = missed = False
        for batch, outcomes in ended:
            self._under_way.difference_update(batch)
            # Even what was handled: it may be pending again, or still be on a replica.
            self._tried.update(outcomes)
            for pk, outcome in outcomes.items():
                self._run.tally.count(pk, outcome)
                if outcome is Miss.ABSENT:
                    self._absent.append(pk)
                was_missed = isinstance(outcome, Miss)
                got, missed = got or not was_missed, missed or was_missed
            if waiting is not None:
                waiting.extendleft(pk for pk in reversed(batch) if pk not in outcomes)
        return got, missed

    def _look_at_absent(self, question: pending.Question[Any]) -> None:
        """Remember the rows that others have locked, and count those that are finished.

        SKIP LOCKED gives neither of them, and only what is locked is worth coming back for: one
        look per window, without a lock, tells them apart when there is something to tell.
        """
        absent, self._absent = self._absent, []
        locked = windows.still_pending(question, absent)
        self._run.tally.counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self._locked)
        self._locked += locked[:room]
        self._run.tally.counts["skipped"] += len(locked[room:])
