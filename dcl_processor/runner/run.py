"""The run: passes over the candidates until no row is left that can be handled now."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db import connections
from django.db.models import Model, Q, QuerySet

from dcl_processor import observers, oversight
from dcl_processor.candidates.groups import refuse_order
from dcl_processor.candidates.question import Question, ask
from dcl_processor.definition import model_columns
from dcl_processor.definition.groups import groups_of
from dcl_processor.definition.kinds import rules_of
from dcl_processor.delivery.batch import Context
from dcl_processor.delivery.deliveries import confirmed, refuse_unknown
from dcl_processor.delivery.heartbeat import Heartbeat
from dcl_processor.execution import calls, failed_elsewhere
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.green_threads import refuse_green_threads
from dcl_processor.execution.handler import Outcome
from dcl_processor.execution.in_flight import InFlight, Notes
from dcl_processor.execution.leftover import Leftover
from dcl_processor.execution.resource import OpenFailure, Resource
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.locking.isolation import (
    refuse_other_transactions,
    refuse_outer_transaction,
    refuse_test_case,
)
from dcl_processor.locking.key_lock import refuse_database, refuse_without_skip_locked
from dcl_processor.locking.row_transactions import RowTransactions
from dcl_processor.locking.slots import Slot
from dcl_processor.log_fields import Running, known_as
from dcl_processor.report import Report, Stopped
from dcl_processor.signals import row_finished, run_finished, run_started

from . import limits
from .async_dispatch import AsyncDispatcher
from .counters import Counters, attach_report, log_end
from .dispatch import Dispatcher, InlineDispatcher, ThreadDispatcher
from .group_passes import GroupPasses
from .holds import LONGEST, Holds, refuse_without_ledger
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
    slot: Slot | None = None
    #: Whether other workers may keep this one from starting a row.
    is_shared: bool = False
    is_interrupted: bool = False
    #: What may keep rows from starting besides: an operator, or the processor itself.
    holds: Holds | None = None

    def __call__(self, so_far: dict[Any, Outcome]) -> bool:
        """Return whether one more handler may be called.

        ``so_far``: the outcomes of its batch, which are not counted yet.
        """
        if self.is_interrupted or self.counters.streak.ends_the_run:
            return False
        if self.limits.exceeded(self.counters.handled):
            return False
        if self.is_shared and (self.counters.too_many_elsewhere or not self.has_slot()):
            return False
        if self.holds is not None and self.holds.must_stop():
            return False
        if not so_far:
            return True
        if self.counters.fails_too_often(so_far):
            return False
        # A failed row may have spoilt the resource. Handlers on the event loop share it, and it is
        # reopened between batches.
        return self.event_loop is not None or self.resource.ready()

    def has_slot(self) -> bool:
        """Return whether the run holds the slot that ``max_workers`` requires."""
        return self.slot is None or self.slot.is_held()

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
        max_failures: int | None,
        timeout: float | timedelta | None,
        wait_for_locked: float | timedelta,
        wait_for_slot: float | timedelta,
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
        limits.check_max_failures(max_failures)
        self.limits = limits.Limits(
            limit=limit,
            timeout=timeout,
            wait_for_locked=wait_for_locked,
            wait_for_slot=wait_for_slot,
            stop=stop,
        )
        self.processor = processor
        self.filter = filter
        self.using = using or processor.using
        self.counters = self.make_counters(max_failures)
        self.event_loop = self.make_event_loop(concurrency)
        self.open_failure = OpenFailure()
        self.resource = self.make_resource()
        self.time_limit = self.make_time_limit()
        self.notes = Notes(processor.name)
        self.in_flight = InFlight(self.notes)
        self.heartbeat = self.make_heartbeat()
        self.starts = Starts(self.limits, self.counters, self.resource, self.event_loop)
        self.context = Context(
            processor=processor,
            resource=self.resource,
            in_flight=self.in_flight,
            event_loop=self.event_loop,
            heartbeat=self.heartbeat,
            may_start=self.starts,
            transactions=RowTransactions(confirmed),
            time_limit=self.time_limit,
        )
        self._most_pending = processor.max_pending if limit is None else None
        self.concurrency = concurrency
        self.dispatcher = self.make_dispatcher(concurrency)
        self.stopped: Stopped | None = None
        self.overseer: oversight.Overseer | None = None

    def make_counters(self, max_failures: int | None) -> Counters:
        return Counters(self.processor, max_failures)

    def make_event_loop(self, concurrency: int) -> EventLoop | None:
        if not self.processor._is_async:
            return None
        return EventLoop(self.processor.name, concurrency, self.processor._time_limit)

    def make_time_limit(self) -> TimeLimit | None:
        """Return the limit of each call of a plain handler; the event loop has its own."""
        seconds = self.processor._time_limit
        if seconds is None or self.event_loop is not None:
            return None
        label = self.processor.name
        refuse_green_threads(label, "handler_timeout", "leave handler_timeout out")
        return TimeLimit(seconds, label)

    def make_resource(self) -> Resource:
        return Resource(self.processor, self.event_loop, self.open_failure)

    def make_heartbeat(self) -> Heartbeat | None:
        lease = self.processor.lease
        limits = self.event_loop or self.time_limit
        return Heartbeat(lease, self.processor.name, limits) if lease else None

    def make_dispatcher(self, concurrency: int) -> Dispatcher:
        """Return the dispatcher: threads for a plain handler with a concurrency over 1."""
        size = self.processor.batch_size
        if self.event_loop is not None:
            together = self.processor._handles_batches
            return AsyncDispatcher(self.event_loop, size=size, together=together)
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

    def checked(self) -> Question[M]:
        """Return the question of all pending rows; raise if a run cannot be made here."""
        # Without the processor's own conditions, because their columns are not checked yet.
        question = self.ask(due=False)
        model_columns.check(self.processor, question.model, question.using)
        refuse_outer_transaction(question.using, self.processor.name)
        return question

    def refuse_backlog(self, question: Question[M], seen: Collection[Any] | None = None) -> None:
        """Raise ``TooManyPending`` before the first row; ``seen``: the keys of a window, if any."""
        most, self._most_pending = self._most_pending, None
        if most is not None:
            number = None if seen is None else len(seen)
            limits.refuse_backlog(self.processor.name, question, most, seen=number)

    def execute(self) -> Report:
        """Do the run, and return its report."""
        question = self.checked()
        running = Running(self.processor.name, str(self.processor.delivery), question.using)
        with known_as(running):
            return self.execute_on(question, running)

    def execute_on(self, question: Question[M], running: Running) -> Report:
        """Do the run on the pending rows, and return its report."""
        self.prepare(question)
        passes = Passes(self) if self.processor.group_by is None else self.group_passes(question)
        self.announce(running)
        ended_by: BaseException | None = None
        try:
            self.oversee()
            if not self.is_held_back():
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
                # In reverse order, and each of them, also if an interrupt ends another.
                with ExitStack() as steps:
                    if self.starts.is_interrupted:
                        steps.callback(Leftover(question.using).end)
                    steps.callback(self.leave)
                    self.dispatcher.close()
                    passes.take(self.dispatcher.left())
            except BaseException as error:
                ended_by = ended_by or error
                raise
            finally:
                report = self.counters.report(self.stopped or "drained", self.open_failure.error)
                self.end_overseer(report, ended_by)
                self.log(report)
                self.conclude(running, report, ended_by)
                attach_report(ended_by, report)
                ended_by = None  # or it would keep this frame, and this frame the error
        self.send(report)
        return report

    def prepare(self, question: Question[M]) -> None:
        """Raise if the run cannot be made here; prepare what it shares with other workers."""
        if self.concurrency > 1:
            self.share_no_test_case(question.using)
        if self.time_limit is not None:
            refuse_other_transactions(question.using, self.processor.name)
        refuse_small_pool(
            question.using,
            self.processor.name,
            threads=self.concurrency if isinstance(self.dispatcher, ThreadDispatcher) else 0,
            heartbeat=self.heartbeat is not None,
            overseer=oversight.connections_of(question.using),
        )
        self.share(question.using)
        if self.needs_notes():
            self.notes.using = question.using

    def needs_notes(self) -> bool:
        """Return whether a row that kills its process might be first again in every run."""
        processor = self.processor
        if self.hands_out:
            return False
        # In the other deliveries a claim outlives its process, so that the row is not first again;
        # but rows that were in one call would be in one call again when their leases have lapsed.
        if rules_of(processor).in_transaction or processor._handles_batches:
            return True
        # Race: poison row. A leased row is first again when its lease has lapsed, unless the
        # attempts that are counted at its claim are limited.
        bounds = processor.retry is not None and processor.retry.bounds_attempts
        return processor.lease is not None and not bounds

    def end_overseer(self, report: Report, error: BaseException | None) -> None:
        """Let what oversees the run know of its end; ``error``: what it raises."""
        if self.overseer is not None:
            self.overseer.end(report, error)

    def log(self, report: Report) -> None:
        """Log the end of the run."""
        log_end(report)

    def announce(self, running: Running) -> None:
        """Let receivers and observers know that the run begins."""
        run_started.send_robust(type(self.processor), processor=self.processor, run_id=running.id)
        if observers.active:
            observers.tell("run_started", running)

    def conclude(self, running: Running, report: Report, error: BaseException | None) -> None:
        """Let observers know that the run has ended; ``error``: what it raises."""
        if observers.active:
            observers.tell("run_ended", running, report, error)

    def send(self, report: Report) -> None:
        """Send the signal."""
        sender = type(self.processor)
        run_finished.send_robust(sender, processor=self.processor, report=report)

    def share(self, using: str) -> None:
        """Prepare what the run has in common with other workers, if anything."""
        name, most = self.processor.name, self.processor.max_workers
        elsewhere = failed_elsewhere.of_run(name, using)
        self.context.elsewhere = self.counters.elsewhere = elsewhere
        if self.processor.group_by is not None and self.processor._handles_batches:
            self.context.called = failed_elsewhere.called_of_run(name, using)
        if most is not None:
            self.starts.slot = Slot(using, name, most)
        self.starts.is_shared = elsewhere is not None or most is not None

    #: Seconds that the run waits at most while rows may not start.
    longest_hold = LONGEST
    #: Whether the rows are handled elsewhere.
    hands_out = False
    #: Columns that are left out of the rows.
    deferred: Collection[str] = ()

    def oversee(self) -> None:
        """Ask the processor, and an overseer if there is one, from now on whether rows may start.

        Raises ``Unsupported`` if the processor needs an overseer and there is none.
        """
        processor = self.processor
        self.overseer = oversight.of_run(processor, self.counters, hands_out=self.hands_out)
        if self.overseer is None:
            refuse_without_ledger(processor)
        else:
            self.counters.on_outcome = self.overseer.note
        if self.overseer is not None or processor._has_throttle:
            self.starts.holds = Holds(processor, self.overseer, self.dispatcher.confirm)

    def is_held_back(self) -> bool:
        """Return whether the run ends before it has looked for rows."""
        if self.starts.holds is not None:
            self.stopped = self.hold_on(self.starts.holds)
        return self.stopped is not None

    def hold_on(self, holds: Holds) -> Stopped | None:
        """Return why no row may start any more; wait until rows may start, if that is soon."""
        while (hold := holds.now()) is not None:
            if hold.wait is None or hold.wait > self.longest_hold:
                return hold.stopped
            if self.dispatcher.rows_in_flight:
                return None  # it starts no row, and waits for the end of these
            self.limits.pause(hold.wait)
            if reason := self.limits.exceeded(self.counters.handled):
                return reason
        return None

    def group_passes(self, question: Question[M]) -> GroupPasses:
        """Return the passes over the keys of a processor that has ``group_by``."""
        groups = groups_of(self.processor, question.model)
        related = self.processor.lock_related
        refuse_database(question, self.processor.name, related=related)
        if related:
            refuse_without_skip_locked(question.using, self.processor.name)
        if groups.in_order:
            refuse_order(question, self.processor.name)
        return GroupPasses(self, groups)

    def leave(self) -> None:
        """Close what the handlers used, and end the threads, also if an interrupt ends a step."""
        with ExitStack() as steps:  # in reverse order
            steps.callback(self.notes.close)
            if self.starts.slot is not None:
                steps.callback(self.starts.slot.release)
            if self.heartbeat is not None:
                steps.callback(self.heartbeat.close)
            if self.event_loop is not None:
                steps.callback(self.event_loop.close)
            steps.callback(self.context.leave_thread)
            if self.time_limit is not None:
                steps.callback(self.time_limit.close)

    @property
    def is_filtered(self) -> bool:
        """Whether the run asks for some of the pending rows only."""
        return self.filter is not None

    def must_stop(self) -> bool:
        """Return whether the run must stop; called before each batch. Once stopped, it stays so."""
        if self.stopped is not None:
            return True
        if self.counters.streak.ends_the_run or self.open_failure.error is not None:
            self.stopped = "failures"
        else:
            self.stopped = self.limits.exceeded(self.counters.handled)
        if self.stopped is None and self.starts.is_shared:
            self.stopped = self.held_back()
        if self.stopped is None and self.starts.holds is not None:
            self.stopped = self.hold_on(self.starts.holds)
        return self.stopped is not None

    def held_back(self) -> Stopped | None:
        """Return why other workers keep this one from starting a row; wait for a slot first.

        A slot that was lost is taken again when no row is in flight any more.
        """
        if self.counters.too_many_elsewhere:
            return "failures"
        slot = self.starts.slot
        if slot is None or slot.is_held() or self.dispatcher.rows_in_flight:
            return None
        waits = self.limits.waits_for_slot()
        while not slot.take():
            if not next(waits, False):
                return self.limits.exceeded(self.counters.handled) or "busy"
            if reason := self.limits.exceeded(self.counters.handled):
                return reason
        return None

    def ask(self, *, due: bool = True, among: Q | None = None) -> Question[M]:
        """Return a new question for the user's ``pending``; ``among``: narrowed to these rows."""
        self.dispatcher.confirm()
        processor = self.processor

        def due_now(model: type[Model]) -> Q | None:
            asked = processor._due(model) if due else None
            return asked if among is None else among if asked is None else among & asked

        source: Any = processor.pending
        if not isinstance(source, QuerySet):
            source = partial(calls.beside, processor.name, "pending()", (), source)
        return ask(
            source,
            label=processor.name,
            filter=self.filter,
            using=self.using,
            read_using=processor.read_using,
            due=due_now,
            flips=processor._locked_columns,
            defer=self.deferred,
        )
