"""The run: passes over the candidates until no row is left that can be handled now."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db import connections
from django.db.models import Model, Q

from dcl_processor.candidates.groups import refuse_order
from dcl_processor.candidates.question import Question, ask
from dcl_processor.definition import model_columns
from dcl_processor.definition.groups import groups_of
from dcl_processor.definition.kinds import rules_of
from dcl_processor.delivery.batch import Context
from dcl_processor.delivery.deliveries import confirmed, refuse_unknown
from dcl_processor.delivery.heartbeat import Heartbeat
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.handler import Outcome
from dcl_processor.execution.in_flight import InFlight, Notes
from dcl_processor.execution.leftover import Leftover
from dcl_processor.execution.resource import Broken, Resource
from dcl_processor.locking.isolation import refuse_outer_transaction, refuse_test_case
from dcl_processor.locking.key_lock import refuse_database
from dcl_processor.locking.row_transactions import RowTransactions
from dcl_processor.report import Report, Stopped
from dcl_processor.signals import row_finished, run_finished

from . import limits
from .async_dispatch import AsyncDispatcher
from .counters import Counters, attach_report, log_end
from .dispatch import Dispatcher, InlineDispatcher, ThreadDispatcher
from .group_passes import GroupPasses
from .passes import Passes
from .pool import refuse_small_pool

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

M = TypeVar("M", bound=Model)


@dataclass(slots=True)
class Starts:
    """Decides whether a delivery may start another row."""

    limits: limits.Limits
    counters: Counters
    resource: Resource
    event_loop: EventLoop | None
    is_interrupted: bool = False

    def __call__(self, so_far: dict[Any, Outcome]) -> bool:
        """Return whether one more handler may be called.

        ``so_far``: the outcomes of its batch, which are not counted yet.
        """
        if self.is_interrupted or self.counters.streak.ends_the_run:
            return False
        if self.limits.exceeded(self.counters.handled):
            return False
        if not so_far:
            return True
        if self.counters.fails_too_often(so_far):
            return False
        # A failed row may have worn the resource. Handlers on the event loop share it, and it is
        # reopened between batches.
        return self.event_loop is not None or self.resource.ready()

    def goes_well(self) -> bool:
        """Return whether rows succeed: otherwise the next row depends on how this one ends."""
        return self.counters.streak.succeeded and not self.counters.streak.failed

    def may_wait(self) -> bool:
        """Return whether a batch's COMMIT may wait for the next claim: no user code comes before.

        The run's own thread calls it in between.
        """
        return (
            self.goes_well()
            and self.limits.has_plain_stop
            and not row_finished.has_listeners(type(self.counters.processor))
        )


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
        concurrency: int | None,
        stop: Event | None,
    ) -> None:
        refuse_unknown(processor)
        limits.check_alias("using", using or processor.using)
        limits.check_alias("read_using", processor.read_using)
        limits.check_filter(filter)
        # The argument overrides the option. Inside TestCase, the option alone starts no threads.
        self.asks_concurrency = concurrency is not None
        concurrency = processor.concurrency if concurrency is None else concurrency
        limits.check_concurrency(concurrency, is_async=processor._is_async)
        limits.check_stop(stop)
        self.limits = limits.Limits(
            limit=limit, timeout=timeout, wait_for_locked=wait_for_locked, stop=stop
        )
        self.processor = processor
        self.filter = filter
        self.using = using or processor.using
        self.counters = Counters(processor)
        self.event_loop = EventLoop(processor.name, concurrency) if processor._is_async else None
        self.broken = Broken()
        self.resource = Resource(processor, self.event_loop, self.broken)
        self.notes = Notes(processor.name)
        self.in_flight = InFlight(self.notes)
        self.heartbeat = Heartbeat(processor.lease, processor.name) if processor.lease else None
        self.starts = Starts(self.limits, self.counters, self.resource, self.event_loop)
        self.context = Context(
            processor=processor,
            resource=self.resource,
            in_flight=self.in_flight,
            event_loop=self.event_loop,
            heartbeat=self.heartbeat,
            may_start=self.starts,
            transactions=RowTransactions(confirmed),
        )
        self.concurrency = concurrency
        self.dispatcher = self.make_dispatcher(concurrency)
        self.stopped: Stopped | None = None

    def make_dispatcher(self, concurrency: int) -> Dispatcher:
        """Return the dispatcher: threads for a plain handler with a concurrency over 1."""
        size = self.processor.batch_size
        if self.event_loop is not None:
            return AsyncDispatcher(self.event_loop, size=size)
        if concurrency == 1:
            return InlineDispatcher(self.context, size=size, may_wait=self.starts.may_wait)
        return ThreadDispatcher(
            self.context, size=size, number=concurrency, in_advance=self.starts.goes_well
        )

    def share_no_test_case(self, using: str) -> None:
        """Handle one row at a time inside ``TestCase``, or refuse if the run asks for more."""
        if self.asks_concurrency:
            refuse_test_case(using, self.processor.name)
        elif connections[using].in_atomic_block:
            self.concurrency = 1
            if self.event_loop is not None:
                self.event_loop.concurrency = 1
            self.dispatcher = self.make_dispatcher(1)

    def execute(self) -> Report:
        """Do the run, and return its report."""
        # Without the processor's own conditions, because their columns are not checked yet.
        question = self.ask(due=False)
        model_columns.check(self.processor, question.model, question.using)
        refuse_outer_transaction(question.using, self.processor.name)
        if self.concurrency > 1:
            self.share_no_test_case(question.using)
        refuse_small_pool(
            question.using,
            self.processor.name,
            threads=self.concurrency if isinstance(self.dispatcher, ThreadDispatcher) else 0,
            heartbeat=self.heartbeat is not None,
        )
        # In the other deliveries a claim outlives its process, so that the row is not first again.
        if rules_of(self.processor).in_transaction:
            self.notes.using = question.using
        passes = Passes(self) if self.processor.group_by is None else self.group_passes(question)
        ended_by: BaseException | None = None
        try:
            passes.first()
            passes.later()
            passes.last()
        except Exception as error:
            # Batches that other threads have begun are completed and counted.
            with suppress(Exception):
                passes.take(self.dispatcher.ended(everything=True))
            self.stopped, ended_by = "failures", error
            raise
        except BaseException as error:
            self.stopped, ended_by = "signal", error
            self.starts.is_interrupted = True
            raise
        finally:
            try:
                self.dispatcher.close()
                passes.take(self.dispatcher.left())
            finally:
                self.leave()
                if self.starts.is_interrupted:
                    Leftover(question.using).end()
                report = self.counters.report(self.stopped or "drained", self.broken.error)
                log_end(report)
                attach_report(ended_by, report)
                ended_by = None  # or it would keep this frame, and this frame the error
        sender = type(self.processor)
        run_finished.send_robust(sender, processor=self.processor, report=report)
        return report

    def group_passes(self, question: Question[M]) -> GroupPasses:
        """Return the passes over the keys of a processor that has ``group_by``."""
        groups = groups_of(self.processor, question.model)
        refuse_database(question, self.processor.name)
        if groups.in_order:
            refuse_order(question, self.processor.name)
        return GroupPasses(self, groups)

    def leave(self) -> None:
        """Close what the handlers used, and end the threads."""
        self.context.leave_thread()
        if self.event_loop is not None:
            self.event_loop.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        self.notes.close()

    @property
    def is_filtered(self) -> bool:
        """Whether the run asks for some of the pending rows only."""
        return self.filter is not None

    def must_stop(self) -> bool:
        """Return whether the run must stop; called before each batch. Once stopped, it stays so."""
        if self.stopped is not None:
            return True
        if self.counters.streak.ends_the_run or self.broken.error is not None:
            self.stopped = "failures"
        else:
            self.stopped = self.limits.exceeded(self.counters.handled)
        return self.stopped is not None

    def ask(self, *, due: bool = True, among: Q | None = None) -> Question[M]:
        """Return a new question for the user's ``pending``; ``among``: narrowed to these rows."""
        self.dispatcher.confirm()
        processor = self.processor
        due_now = processor._due() if due else None
        if among is not None:
            due_now = among if due_now is None else among & due_now
        return ask(
            processor.pending,
            label=processor.name,
            filter=self.filter,
            using=self.using,
            read_using=processor.read_using,
            due=due_now,
            flips=processor.done if processor._has_fixed_flip else None,
            defer=processor._renewed_columns() if due else (),
        )
