"""The run: passes over the candidates until nothing is left that could be done now."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db.models import Model, Q

from . import budget, candidates, pending, rehearsal, requirements
from .delivery import DELIVERIES, Delivery
from .event_loop import EventLoop
from .execution import Discarded, Failed, Handled, Lost, Outcome, Snoozed
from .isolation import refuse_outer_transaction, refuse_test_case
from .lease import Keeper
from .locking import Miss
from .report import Report, Stopped
from .resource import Resource
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
        concurrency: int,
        stop: Event | None,
    ) -> None:
        budget.check_alias("using", using or processor.using)
        budget.check_alias("read_using", processor.read_using)
        budget.check_filter(filter)
        budget.check_concurrency(concurrency, is_async=processor._is_async, label=processor.name)
        self.budget = budget.Budget(
            limit=limit, timeout=timeout, wait_for_locked=wait_for_locked, stop=stop
        )
        self.processor = processor
        self.filter = filter
        self.using = using or processor.using
        self.tally = Tally(processor)
        self.locked: list[Any] = []
        self.absent: list[Any] = []
        self.tried: set[Any] = set()
        self.rehearsed = False
        self.event_loop = EventLoop(processor.name, concurrency) if processor._is_async else None
        self.resource = Resource(processor, self.event_loop)
        self.concurrency = concurrency
        self.size = max(processor.batch_size, concurrency)
        self.deliver = DELIVERIES[Delivery(processor.delivery)]
        self.keeper = Keeper(processor.lease, processor.name) if processor.lease else None
        self.stopped: Stopped | None = None

    def report(self) -> Report:
        """Run, and return what became of it."""
        # Without what the processor demands itself, whose columns are yet to be looked at.
        question = self.ask(due=False)
        requirements.check(self.processor, question.model)
        refuse_outer_transaction(question.using, self.processor.name)
        if self.concurrency > 1:
            refuse_test_case(question.using, self.processor.name)
        try:
            self.first_pass()
            self.later_passes()
        finally:
            self.resource.close()
            if self.event_loop is not None:
                self.event_loop.close()
            if self.keeper is not None:
                self.keeper.close()
            report = self.tally.report(self.stopped or "drained")
            log_end(report)
        sender = type(self.processor)
        run_finished.send_robust(sender, processor=self.processor, report=report)
        return report

    def first_pass(self) -> None:
        """Visit every candidate once."""
        self.tally.passes += 1
        walk = candidates.Walk(self.ask, self.tried)
        in_order = candidates.walk_in_order(self.ask, self.tried)
        for question, pks in in_order if self.processor.strict_order else walk:
            waiting = deque(pks)
            # Where nothing was got yet, somebody may hold the rows in bulk, and they stay held: a
            # new look pays only when the window has grown old.
            worth_a_look = not walk.among_others
            while waiting and not self.must_stop():
                got, missed = self.visit(question, waiting)
                worth_a_look = worth_a_look or got
                if missed and worth_a_look and not self.processor.strict_order:
                    walk.met_another()
                    break
            if len(self.absent) >= candidates.WINDOW:
                self.look_at_absent(question)
            if self.stopped:
                break
        if self.absent:
            self.look_at_absent(self.ask())

    def later_passes(self) -> None:
        """Come back to the rows that others had locked, and to no others."""
        waits = self.budget.waits()
        while self.locked and not self.must_stop() and next(waits, False):
            self.tally.passes += 1
            waiting, self.locked = deque(self.locked), []
            while waiting:
                question = self.ask()
                while waiting and len(self.absent) < candidates.WINDOW and not self.must_stop():
                    self.visit(question, waiting)
                self.look_at_absent(question)
                if self.must_stop():
                    self.locked += waiting
                    break
        if self.locked:
            self.must_stop()
        self.tally.counts["skipped"] += len(self.locked)

    def visit(self, question: pending.Question[M], waiting: deque[Any]) -> tuple[bool, bool]:
        """Claim and handle the next batch; tell whether any row was got, and whether any missed."""
        if not self.resource.ready():
            return False, False
        size = self.budget.clip(self.size, self.tally.handled)
        batch = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        outcomes = self.deliver(self, question, batch)
        for pk, outcome in outcomes.items():
            self.count(pk, outcome)
            if self.event_loop is not None and isinstance(outcome, Failed):
                self.resource.worn()
            # Even one that was handled: it may be pending again, or still be on a replica.
            self.tried.add(pk)
        # Not reached, because the run was stopped in between.
        waiting.extendleft(pk for pk in reversed(batch) if pk not in outcomes)
        missed = sum(isinstance(outcome, Miss) for outcome in outcomes.values())
        return missed < len(outcomes), missed > 0

    def count(self, pk: Any, outcome: Outcome | Miss) -> None:
        """Put an outcome into the report."""
        match outcome:
            case Handled():
                self.tally.processed(pk)
            case Failed():
                self.tally.failed(pk, outcome)
            case Snoozed():
                self.tally.snoozed(pk)
            case Discarded():
                self.tally.discarded(pk, outcome)
            case Lost():
                self.tally.counts["lease_lost"] += 1
            case Miss.STALE:
                self.tally.counts["stale"] += 1
            case Miss.ABSENT:
                self.absent.append(pk)

    def may_start(self, so_far: dict[Any, Any]) -> bool:
        """Tell a delivery whether a row may start.

        ``so_far``: the outcomes of its batch, which are not counted yet.
        """
        if self.budget.exceeded(self.tally.handled) or self.tally.would_be_in_vain(so_far):
            return False
        # Handlers on the event loop share the resource, which is opened anew between batches.
        return self.event_loop is not None or self.resource.ready()

    def look_at_absent(self, question: pending.Question[M]) -> None:
        """Remember the rows that others have locked, and count those that are finished.

        SKIP LOCKED gives neither of them, and only what is locked is worth coming back for: one
        look per window, without a lock, tells them apart when there is something to tell.
        """
        absent, self.absent = self.absent, []
        locked = candidates.still_pending(question, absent)
        self.tally.counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self.locked)
        self.locked += locked[:room]
        self.tally.counts["skipped"] += len(locked[room:])

    def must_stop(self) -> bool:
        """Ask, before each batch, whether it may start."""
        if self.tally.processor_is_wrong or self.tally.too_many_failures or self.resource.broken:
            self.stopped = "failures"
        else:
            self.stopped = self.budget.exceeded(self.tally.handled)
        return self.stopped is not None

    def rehearse(self, question: pending.Question[M], rows: Mapping[Any, M]) -> None:
        """Rehearse the flips on the first row that is claimed."""
        if rows and not self.rehearsed:
            rehearsal.rehearse(self.processor, question, next(iter(rows)))
            self.rehearsed = True

    def ask(self, *, due: bool = True) -> pending.Question[M]:
        """Ask the user's question afresh."""
        processor = self.processor
        return pending.ask(
            processor.pending,
            label=processor.name,
            filter=self.filter,
            using=self.using,
            read_using=processor.read_using,
            due=processor._due() if due else None,
            flips=processor.done if processor._has_fixed_flip else None,
        )
