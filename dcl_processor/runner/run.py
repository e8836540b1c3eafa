"""The run: passes over the candidates until nothing is left that could be done now."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db.models import Model, Q

from dcl_processor.candidates import pending, windows
from dcl_processor.definition import requirements
from dcl_processor.delivery.batch import Outcomes, Steps
from dcl_processor.delivery.keeper import Keeper
from dcl_processor.delivery.orders import DELIVERIES
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.handler import Discarded, Failed, Handled, Lost, Outcome, Snoozed
from dcl_processor.execution.resource import Broken, Resource
from dcl_processor.locking.claiming import Miss
from dcl_processor.locking.isolation import refuse_outer_transaction, refuse_test_case
from dcl_processor.report import Report, Stopped
from dcl_processor.settlement import rehearsal
from dcl_processor.signals import run_finished

from . import budget
from .crew import Alone, Threads
from .patience import Patience
from .rolling import Rolling
from .tally import Tally, log_end

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

M = TypeVar("M", bound=Model)

#: Locked rows that one run remembers and comes back to.
MOST_LOCKED = 10_000


class Run(Generic[M]):
    """One call of ``run()``; all state of a run lives here, none on the processor."""

    def __init__(
        self,
        processor: Definition[M],
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
        budget.check_concurrency(concurrency)
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
        self.under_way: set[Any] = set()
        self.interrupted = False
        self.rehearsed = False
        self.doubtful: Collection[str] = ()
        self.event_loop = EventLoop(processor.name, concurrency) if processor._is_async else None
        self.resource = Resource(processor, self.event_loop, Broken())
        self.concurrency = concurrency
        self.crew = self.gather(concurrency)
        self.keeper = Keeper(processor.lease, processor.name) if processor.lease else None
        self.stopped: Stopped | None = None

    def gather(self, concurrency: int) -> Alone | Threads | Rolling:
        """Return who delivers: more than one where handlers are plain functions, and asked for."""
        size = self.processor.batch_size
        if self.event_loop is not None:
            return Rolling(self.deliver, self.event_loop, size=size)
        if concurrency == 1:
            return Alone(self.deliver, size=size)
        return Threads(
            self.deliver,
            size=size,
            number=concurrency,
            label=f"{self.processor.name}: handlers",
            may_share=lambda: self.rehearsed,
            leave=self.resource.close,
        )

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
        except Exception:
            # What other threads have begun is brought to its end, and counted.
            with suppress(Exception):
                self.take(self.crew.ended(everything=True))
            raise
        except BaseException:
            self.interrupted = True
            raise
        finally:
            try:
                self.crew.close()
            finally:
                self.leave()
                report = self.tally.report(self.stopped or "drained", self.resource.error)
                log_end(report)
        sender = type(self.processor)
        run_finished.send_robust(sender, processor=self.processor, report=report)
        return report

    def leave(self) -> None:
        """Close what handlers had, and end the threads."""
        self.resource.close()
        if self.event_loop is not None:
            self.event_loop.close()
        if self.keeper is not None:
            self.keeper.close()

    def first_pass(self) -> None:
        """Visit every candidate once."""
        self.tally.passes += 1
        patience = Patience(endless=self.processor.strict_order)
        walk = windows.Walk(self.ask, self.tried)
        in_order = windows.walk_in_order(self.ask, self.tried)
        for question, pks in in_order if self.processor.strict_order else walk:
            waiting = deque(pk for pk in pks if pk not in self.under_way)
            patience.begin(alone=not walk.among_others)
            while waiting and not self.must_stop():
                if patience.ends(*self.visit(question, waiting)):
                    walk.met_another()
                    break
            if len(self.absent) >= windows.WINDOW:
                self.look_at_absent(question)
            if self.stopped:
                break
        left: deque[Any] = deque()
        self.take(self.crew.ended(everything=True), left)
        # A batch is given up on by a run alone that is to stop, be it by its last batch.
        if left and not self.stopped:
            self.must_stop()
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
                while waiting and len(self.absent) < windows.WINDOW and not self.must_stop():
                    self.visit(question, waiting)
                self.take(self.crew.ended(everything=True), waiting)
                self.look_at_absent(question)
                if self.must_stop():
                    self.locked += waiting
                    break
        if self.locked:
            self.must_stop()
        self.tally.counts["skipped"] += len(self.locked)

    def visit(self, question: pending.Question[M], waiting: deque[Any]) -> tuple[bool, bool]:
        """Hand out the next batch, and take those that have ended.

        Tells whether any row of these was got, and whether any was missed.
        """
        tried = self.tally.handled + self.crew.rows_under_way
        size = min(self.budget.clip(self.crew.room, tried), len(waiting))
        if size:
            batch = [waiting.popleft() for _ in range(size)]
            # Now, and not when it ends: the next window may be read before that.
            self.tried.update(batch)
            self.under_way.update(batch)
            self.crew.begin(question, batch)
        # Without room for a row the limit may be reached, or not, when those have ended.
        return self.take(self.crew.ended(everything=not size), waiting)

    def take(
        self, ended: Iterable[tuple[Sequence[Any], Outcomes]], waiting: deque[Any] | None = None
    ) -> tuple[bool, bool]:
        """Count the batches that have ended; what they did not reach waits again."""
        got = missed = False
        for batch, outcomes in ended:
            self.under_way.difference_update(batch)
            # Even what was handled: it may be pending again, or still be on a replica.
            self.tried.update(outcomes)
            for pk, outcome in outcomes.items():
                self.count(pk, outcome)
                was_missed = isinstance(outcome, Miss)
                got, missed = got or not was_missed, missed or was_missed
            if waiting is not None:
                waiting.extendleft(pk for pk in reversed(batch) if pk not in outcomes)
        return got, missed

    def deliver(self, question: pending.Question[M], pks: Sequence[Any]) -> Steps:
        """Claim and handle a batch; called by whoever is of the crew."""
        if not self.resource.ready():
            return {}
        return (yield from DELIVERIES[self.processor.delivery](self, question, pks))

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
        if self.interrupted or self.budget.exceeded(self.tally.handled):
            return False
        if self.tally.would_be_in_vain(so_far):
            return False
        # Handlers on the event loop share the resource, which is opened anew between batches.
        return self.event_loop is not None or self.resource.ready()

    def look_at_absent(self, question: pending.Question[M]) -> None:
        """Remember the rows that others have locked, and count those that are finished.

        SKIP LOCKED gives neither of them, and only what is locked is worth coming back for: one
        look per window, without a lock, tells them apart when there is something to tell.
        """
        absent, self.absent = self.absent, []
        locked = windows.still_pending(question, absent)
        self.tally.counts["stale"] += len(absent) - len(locked)
        room = MOST_LOCKED - len(self.locked)
        self.locked += locked[:room]
        self.tally.counts["skipped"] += len(locked[room:])

    def must_stop(self) -> bool:
        """Ask, before each batch, whether it may start."""
        if (
            self.tally.processor_is_wrong
            or self.tally.too_many_failures
            or self.resource.error is not None
        ):
            self.stopped = "failures"
        else:
            self.stopped = self.budget.exceeded(self.tally.handled)
        return self.stopped is not None

    def rehearse(self, question: pending.Question[M], rows: Mapping[Any, M]) -> None:
        """Rehearse the flips on the first row that is claimed."""
        if rows and not self.rehearsed:
            self.doubtful = rehearsal.rehearse(self.processor, question, next(iter(rows)))
            self.rehearsed = True
            self.crew.look_again()

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
