"""The run: passes over the candidates until nothing is left that could be done now."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db.models import Model, Q

from . import budget, candidates, pending, settlement
from .delivery import transactional
from .execution import Failed, Handled
from .isolation import refuse_outer_transaction
from .locking import Miss
from .report import Report, Stopped
from .signals import run_finished
from .tally import Tally, log_end

if TYPE_CHECKING:
    from .definition import BatchProcessor

M = TypeVar("M", bound=Model)

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000


class Run(Generic[M]):
    """One call of ``run()``; all state of a run lives here, none on the processor."""

    def __init__(
        self,
        processor: BatchProcessor[M],
        *,
        filter: Q | None,
        using: str | None,
        limit: int | None,
        timeout: float | timedelta | None,
        wait_for_locked: float | timedelta,
        stop: Event | None,
    ) -> None:
        budget.check_alias("using", using or processor.using)
        budget.check_alias("read_using", processor.read_using)
        budget.check_filter(filter)
        self.budget = budget.Budget(
            limit=limit, timeout=timeout, wait_for_locked=wait_for_locked, stop=stop
        )
        self.processor = processor
        self.filter = filter
        self.using = using or processor.using
        self.tally = Tally(processor)
        self.locked: list[Any] = []
        self.held: set[Any] = set()
        self.rehearsed = processor.repeats or not processor._has_fixed_flip
        self.stopped: Stopped | None = None

    def report(self) -> Report:
        """Run, and return what became of it."""
        question = self.ask()
        settlement.check_columns(self.processor.done or {}, question.model, self.processor.name)
        refuse_outer_transaction(question.using, self.processor.name)
        try:
            self.first_pass()
            self.later_passes()
        finally:
            report = self.tally.report(self.stopped or "drained")
            log_end(report)
        sender = type(self.processor)
        run_finished.send_robust(sender, processor=self.processor, report=report)
        return report

    def first_pass(self) -> None:
        """Visit every candidate once."""
        self.tally.passes += 1
        windows = (
            candidates.walk_in_order(self.ask, self.held)
            if self.processor.strict_order
            else candidates.walk(self.ask)
        )
        for question, pks in windows:
            locked, _ = self.visit(question, pks)
            self.remember(locked)
            if self.stopped:
                break

    def later_passes(self) -> None:
        """Come back to the rows that others had locked, and to no others."""
        waits = self.budget.waits()
        while self.locked and not self.stopped and next(waits, False):
            self.tally.passes += 1
            waiting, self.locked = self.locked, []
            for start in range(0, len(waiting), candidates.WINDOW):
                chunk = waiting[start : start + candidates.WINDOW]
                locked, unvisited = self.visit(self.ask(), chunk)
                self.remember([*locked, *unvisited])
        if self.locked and not self.stopped:
            self.stopped = self.budget.exceeded(self.tally.handled)
        self.tally.counts["skipped"] += len(self.locked)

    def visit(self, question: pending.Question[M], pks: list[Any]) -> tuple[list[Any], list[Any]]:
        """Claim and handle each row; return those locked by others, and those not reached."""
        absent = []
        unvisited = deque(pks)
        while unvisited and not self.must_stop():
            pk = unvisited.popleft()
            match transactional(self.processor, question, pk, self.before_handler):
                case Handled():
                    self.tally.processed(pk)
                case Failed() as outcome:
                    self.tally.failed(pk, outcome)
                    self.hold(pk)
                case Miss.STALE:
                    self.tally.counts["stale"] += 1
                case Miss.ABSENT:
                    absent.append(pk)
                    self.hold(pk)
        # Locked and stale look the same to SKIP LOCKED. Only what is locked is worth coming back
        # for, so one look per window tells them apart, when there is something to tell.
        locked = candidates.still_pending(question, absent)
        self.tally.counts["stale"] += len(absent) - len(locked)
        return locked, list(unvisited)

    def must_stop(self) -> bool:
        """Ask, before each row, whether it may start."""
        if self.tally.processor_is_wrong:
            self.stopped = "failures"
        else:
            self.stopped = self.budget.exceeded(self.tally.handled)
        return self.stopped is not None

    def before_handler(self, question: pending.Question[M], pk: Any) -> None:
        """Rehearse the flip on the first row that is claimed."""
        if not self.rehearsed:
            settlement.rehearse(self.processor, question, pk)
            self.rehearsed = True

    def remember(self, locked: list[Any]) -> None:
        """Keep the rows to come back to, as far as memory that does not grow allows."""
        room = MOST_LOCKED - len(self.locked)
        self.locked += locked[:room]
        self.tally.counts["skipped"] += len(locked[room:])

    def hold(self, pk: Any) -> None:
        """Keep a row that stays at the head of a strict order, so that it is read past."""
        if self.processor.strict_order:
            self.held.add(pk)

    def ask(self) -> pending.Question[M]:
        """Ask the user's question afresh."""
        processor = self.processor
        return pending.ask(
            processor.pending,
            label=processor.name,
            filter=self.filter,
            using=self.using,
            read_using=processor.read_using,
            flips=processor.done if processor._has_fixed_flip else None,
        )
