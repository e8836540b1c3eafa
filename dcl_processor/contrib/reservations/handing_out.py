"""A run that hands its rows out: they are claimed and marked as in any run, and handled elsewhere.

The run does everything before the handler: it reads the candidates, verifies the flip, claims the
rows, and gives up on rows without attempts left. There is no handler, so there is no resource, no
event loop and no heartbeat: the caller renews the lease of a row that it got.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from dcl_processor.candidates.question import Question
from dcl_processor.candidates.scan import WINDOW
from dcl_processor.engine.lane import Lane
from dcl_processor.engine.marked import put_back, startable
from dcl_processor.engine.run import Run
from dcl_processor.engine.settlement import Batch, Claimed, Held, Settlement, Wanted
from dcl_processor.engine.settling import settle, settle_row
from dcl_processor.exceptions import AttemptsUsedUp
from dcl_processor.execution.handler import Failed, HandedOut, Handled, Outcome
from dcl_processor.execution.resource import Resource
from dcl_processor.log_fields import Running, known_as
from dcl_processor.runner.counters import Counters
from dcl_processor.settlement.rehearsal import Rehearsal

from . import hold

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition


class HandingOut(Run):
    """Hands out up to ``limit`` rows; ``handed``: these, with their batches."""

    hands_out = True
    #: The caller gets no rows, and need not wait.
    longest_hold = 0.0

    def __init__(
        self,
        processor: Definition[Any],
        *,
        limit: int = 1,
        filter: Q | None = None,
        using: str | None = None,
    ) -> None:
        self.handed: list[tuple[Batch, Held]] = []
        # A ``save()`` elsewhere would write back the lease that its instance has loaded, which has
        # been renewed since. It skips deferred fields.
        self.deferred = hold.deferred(processor)
        super().__init__(processor, filter=filter, using=using, limit=limit, concurrency=1)
        self.size = min(limit, WINDOW)
        self.counters = _Counters(processor)

    def make_resource(self) -> Resource:
        resource = super().make_resource()
        resource.is_open = True  # no handler needs it
        return resource

    def make_limits(self) -> tuple[None, None]:
        return None, None

    def hand_out(self) -> None:
        """Claim and mark the rows; if it raises, ``take_back()`` is to be called."""
        question = self.checked()
        running = Running(self.processor.name, str(self.processor.delivery), self.using)
        with known_as(running):
            self.source = self.make_source(question)
            error: BaseException | None = None
            self.oversee()
            try:
                if not self.is_held_back():
                    Lane(self, _hand_out).drive()
            except BaseException as raised:
                error = raised
                raise
            finally:
                report = self.counters.report(self.stopped or "drained", None)
                if self.overseer is not None:
                    self.overseer.end(report, error)
                error = None  # or it would keep this frame, and this frame the error
                self.forget_source()

    def take_back(self) -> None:
        """Put the rows back, because an error keeps them from being handed to anyone."""
        with ExitStack() as steps:  # each of them
            for batch, held in self.handed:
                steps.callback(_take_back, lane_of(self.processor, batch.question), batch, held)


def lane_of(processor: Definition[Any], question: Question[Any]) -> Lane:
    """Return a lane that settles rows which were handed out."""
    run = HandingOut(processor, using=question.using)
    run.using, run.source = question.using, run.make_source(question)
    # Whether a flip takes its row out of pending is checked for each row, because no rehearsal of
    # this process has shown it.
    run.trust(Rehearsal({"done"}, {}))
    lane = Lane(run)
    run.forget_source()
    return lane


def _hand_out(lane: Lane, batch: Batch) -> Settlement:
    """Lock and check again → mark → commit; the caller does the work, and settles the row."""
    run = lane.run
    assert isinstance(run, HandingOut)
    lane.claim_and_mark(batch)
    for held in startable(lane, batch, batch.rows):
        run.handed.append((batch, held))
        # Recorded afterwards: a row without an outcome is put back after an interrupt.
        batch.ended.append((held, HandedOut()))
        held.marked.is_settled = True
    put_back(batch, batch.rows)
    return settle(lane, batch)


def _take_back(lane: Lane, batch: Batch, held: Held) -> None:
    back = Batch(batch.question, Wanted([held.pk]), claimed=Claimed([held]), mark=batch.mark)
    back.ended.append((held, None))
    settle_row(lane, back, 0, is_last=True)


class _Counters(Counters):
    """Counts the rows that were handed out, and only these, for the limit."""

    def count(self, pk: Any, outcome: Outcome) -> None:
        if isinstance(outcome, HandedOut):
            self.streak.note(Handled())
            self.handled += 1
            return
        handled, streak = self.handled, replace(self.streak)
        super().count(pk, outcome)
        self.handled = handled
        if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
            self.streak = streak  # it was given up on, and no handler failed
