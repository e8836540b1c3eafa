"""One run: what its lanes share, and its report; and the dry run, which shows what it would do."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from datetime import timedelta, tzinfo
from itertools import islice
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import Model, Q
from django.utils import timezone, translation

from dcl_processor import observers, oversight
from dcl_processor.candidates import scan
from dcl_processor.candidates.groups import refuse_order
from dcl_processor.candidates.question import Question, ask, is_ordered
from dcl_processor.compiled_sql.cache import StatementCache
from dcl_processor.definition import model_columns, validation
from dcl_processor.definition.groups import groups_of
from dcl_processor.definition.kinds import rules_of
from dcl_processor.execution.event_loop import EventLoop, refuse_green_threads
from dcl_processor.execution.handler import Failed, Lost
from dcl_processor.execution.resource import OpenFailure, Resource
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.interrupts import LOOK
from dcl_processor.locking.isolation import refuse_other_transactions, refuse_outer_transaction
from dcl_processor.locking.key_lock import refuse_collation, refuse_database
from dcl_processor.locking.slots import Slot
from dcl_processor.log_fields import Running, known_as
from dcl_processor.report import MOST_COUNTED, DryRun, Report, Stopped
from dcl_processor.runner import limits
from dcl_processor.runner.counters import Counters, attach_report, log_end
from dcl_processor.runner.in_flight import Notes
from dcl_processor.runner.limits import LONGEST_HOLD, refuse_without_ledger
from dcl_processor.settlement.rehearsal import Rehearsal, RowRefused, rehearse
from dcl_processor.signals import run_finished, run_started
from dcl_processor.values import Values

from .claim import claim
from .heartbeat import Heartbeat
from .key_source import KeySource
from .lane import Lane
from .session import Session
from .settlement import Ended, Held, Wanted
from .source import Source

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

logger = logging.getLogger("dcl_processor")


class Run:
    """One call of ``run()``; all state of a run is here and in its lanes, none on the processor.

    ``hands_out``: the rows are handled elsewhere; ``longest_hold``: seconds that it waits at most
    while rows may not start; ``deferred``: columns that are left out of the rows.
    """

    hands_out = False
    longest_hold = LONGEST_HOLD
    deferred: Collection[str] = ()

    def __init__(
        self,
        processor: Definition[Any],
        *,
        filter: Q | None = None,
        using: str | None = None,
        limit: int | None = None,
        timeout: float | timedelta | None = None,
        wait_for_locked: float | timedelta = 0,
        concurrency: int | None = None,
        stop: Event | None = None,
    ) -> None:
        limits.check_alias("using", using or processor.using)
        limits.check_filter(filter)
        self.concurrency = processor.concurrency if concurrency is None else concurrency
        limits.check_concurrency(self.concurrency, is_async=processor._is_async)
        validation.check_delivers_together(processor, self.concurrency)
        limits.check_stop(stop)
        self.limits = limits.Limits(
            limit=limit, timeout=timeout, wait_for_locked=wait_for_locked, stop=stop
        )
        self.processor = processor
        #: Whether something is written to a row that fails.
        self.notes_failures = processor._notes_failures
        self.filter = filter
        self._alias = using or processor.using
        may_be_refused = processor._flip_needs_result and not self.hands_out
        self.counters = Counters(processor, may_be_refused=may_be_refused)
        self._open_failure = OpenFailure()
        self.event_loop, self.time_limit = self.make_limits()
        lease, call_limits = processor.lease, self.event_loop or self.time_limit
        self.heartbeat: Heartbeat | None = None
        if lease is not None and not self.hands_out:
            self.heartbeat = Heartbeat(lease, processor.name, call_limits)
        #: Rows of one claim.
        self.size = processor.batch_size
        self.notes = Notes(processor.name)
        #: What may keep rows from starting besides, if the ledger is there.
        self.overseer: oversight.Overseer | None = None
        self.slot: Slot | None = None
        self.stopped: Stopped | None = None
        #: Whether an interrupt, or an error that no row has caused, ended the work of a lane.
        self.is_interrupted = self.has_failed = False
        self._most_pending = processor.max_pending if limit is None else None
        #: What a trial of the flips on the run's first row has shown; ``None``: not yet tried.
        self.rehearsal: Rehearsal | None = None
        #: Whether flips may go with the COMMIT; whether each row is asked about after its flip.
        self.flips_may_wait = self.looks_after_flips = False
        #: The values with which a claim's constants are read back.
        self.kept_constants: Values = {}
        self._verifying = Lock()
        self._writes: dict[type[Model], StatementCache] = {}

    def make_limits(self) -> tuple[EventLoop | None, TimeLimit | None]:
        """Return what limits the seconds of a call: the event loop of asynchronous handlers."""
        seconds, label = self.processor._time_limit, self.processor.name
        if self.processor._is_async:
            return EventLoop(label, self.concurrency, seconds), None
        if seconds is None:
            return None, None
        refuse_green_threads(label, "handler_timeout", "leave handler_timeout out")
        return None, TimeLimit(seconds, label)

    def make_resource(self) -> Resource:
        """Return what the handlers of one lane need."""
        return Resource(self.processor, self.event_loop, self._open_failure)

    # --- the course of the run

    def execute(self) -> Report:
        """Do the run, and return its report."""
        question = self.checked()
        running = Running(self.processor.name, str(self.processor.delivery), self.using)
        with known_as(running):
            return self._execute(question, running)

    def checked(self) -> Question[Any]:
        """Return the question of all pending rows; raise if a run cannot be made here."""
        # Without the processor's own conditions, because their columns are not checked yet.
        question = self.ask(due=False)
        model_columns.check(self.processor, question.model, question.using)
        refuse_outer_transaction(question.using, self.processor.name)
        self.using = self._alias = question.using
        return question

    def _execute(self, question: Question[Any], running: Running) -> Report:
        self._prepare()
        self.source = self.make_source(question)
        run_started.send_robust(type(self.processor), processor=self.processor, run_id=running.id)
        if observers.active:
            observers.tell("run_started", running)
        ended_by: BaseException | None = None
        try:
            self.oversee()
            if not self.is_held_back():
                self._drive()
                self.source.finish()
        except Exception as error:
            self.stopped, ended_by = "failures", error
            raise
        except BaseException as error:
            self.stopped, ended_by = "signal", error
            raise
        finally:
            try:
                self.leave()
            except BaseException as error:
                ended_by = ended_by or error
                self.leave()  # each step may be repeated
                raise
            finally:
                report = self._conclude(running, ended_by)
                ended_by = None  # or it would keep this frame, and this frame the error
                self.forget_source()
        sender = type(self.processor)
        run_finished.send_robust(sender, processor=self.processor, report=report)
        return report

    def forget_source(self) -> None:
        """Let go of the candidates, which refer to the run, and of its session."""
        self.source.close()
        del self.source

    def make_source(self, question: Question[Any]) -> Source:
        """Return the candidates; raise if keys cannot be locked, or have no order."""
        processor, name = self.processor, self.processor.name
        if processor.group_by is None:
            return Source(self, question)
        groups = groups_of(processor, question.model)
        refuse_database(question, name)
        if groups.in_order:
            refuse_order(question, name)
        at_once = self.event_loop is not None or self.hands_out
        return KeySource(self, question, groups, at_once=at_once)

    def _conclude(self, running: Running, error: BaseException | None) -> Report:
        report = self.counters.report(self.stopped or "drained", self._open_failure.error)
        if self.overseer is not None:
            self.overseer.end(report, error)
        log_end(report)
        if observers.active:
            observers.tell("run_ended", running, report, error)
        attach_report(error, report)
        return report

    def _prepare(self) -> None:
        """Raise if the run cannot be made here."""
        name = self.processor.name
        # A TestCase commits no rows, so that no other connection would see them.
        if connections[self.using].in_atomic_block:
            limits.refuse_threads_in_tests(name, self._threads)
            if self.event_loop is not None:
                self.event_loop.concurrency = self.concurrency = 1
        if self.time_limit is not None:
            limits.refuse_time_limit_elsewhere(name, self.concurrency)
            refuse_other_transactions(self.using, name)
        limits.refuse_small_pool(
            self.using,
            name,
            threads=self._threads,
            loop=self.event_loop is not None,
            heartbeat=self.heartbeat is not None,
            overseer=oversight.connections_of(self.using),
        )
        if self._threads or self.heartbeat is not None or self.event_loop is not None:
            limits.refuse_tenant(self.using, name)
        if self.processor.max_workers is not None:
            self.slot = Slot(self.using, name, self.processor.max_workers)
        if self._needs_notes():
            self.notes.using = self.using

    def _needs_notes(self) -> bool:
        """Return whether a row that kills its process might be first again in every run."""
        processor = self.processor
        # In the other deliveries a claim outlives its process, so that the row is not first again;
        # but rows that were in one call would be in one call again when their leases have lapsed.
        if rules_of(processor).in_transaction or processor._handles_batches:
            return True
        # Race: poison row. A leased row is first again when its lease has lapsed, unless the
        # attempts that are counted at its claim are limited.
        bounds = processor.retry is not None and processor.retry.max_attempts is not None
        return processor.lease is not None and not bounds

    @property
    def _threads(self) -> int:
        """How many lanes there are in threads of their own, besides the run's."""
        return self.concurrency if self.concurrency > 1 and self.event_loop is None else 0

    def _drive(self) -> None:
        """Let the lanes drive: one in this thread, or several in threads of their own."""
        if not self._threads:
            Lane(self).drive()
            return
        errors: list[BaseException] = []
        zone, language = timezone.get_current_timezone(), translation.get_language()
        name = f"{self.processor.name}: handlers"
        # Daemons: one that an interrupt leaves at work does not keep the process from its end.
        threads = [
            Thread(
                # The caller's context, which a log needs.
                target=copy_context().run,
                args=(self._drive_in_thread, zone, language, errors),
                name=f"{name}: {number + 1}",
                daemon=True,
            )
            for number in range(self._threads)
        ]
        try:
            for thread in threads:
                thread.start()
            # An interrupt that comes before a wait ends it not: it is looked for now and then.
            while any(map(Thread.is_alive, threads)):
                for thread in threads:
                    thread.join(LOOK)
        except BaseException:
            self.is_interrupted = True
            raise
        if errors:
            raise errors[0]

    def _drive_in_thread(
        self, zone: tzinfo, language: str | None, errors: list[BaseException]
    ) -> None:
        try:
            # A question may depend on both, and Django keeps them for each thread.
            with timezone.override(zone), translation.override(language):
                Lane(self).drive()
        except BaseException as error:  # noqa: BLE001  # raised in the run's own thread
            errors.append(error)
        finally:
            connections.close_all()

    def leave(self) -> None:
        """Close what the handlers used, also if an interrupt ends a step."""
        with ExitStack() as steps:  # in reverse order
            steps.callback(self.notes.close)
            if self.slot is not None:
                steps.callback(self.slot.release)
            if self.heartbeat is not None:
                steps.callback(self.heartbeat.close)
            if self.event_loop is not None:
                steps.callback(self.event_loop.close)
            if self.time_limit is not None:
                steps.callback(self.time_limit.close)

    # --- what the lanes ask

    def ask(self, *, due: bool = True, among: Q | None = None) -> Question[Any]:
        """Return a new question for the user's ``pending``; ``among``: narrowed to these rows."""
        processor = self.processor

        def due_now(model: type[Model]) -> Q | None:
            asked = processor._due(model) if due else None
            return asked if among is None else among if asked is None else among & asked

        return ask(
            processor.pending,
            label=processor.name,
            filter=self.filter,
            using=self._alias,
            due=due_now,
            defer=self.deferred,
            writes=self._writes,
        )

    @property
    def has_rules(self) -> bool:
        """Whether PostgreSQL rewrites statements on the table, so that none may be joined."""
        return self.rehearsal is None or self.rehearsal.has_rules

    def needs_check(self, option: str | None) -> bool:
        """Return whether each row is to be checked after the flip that this option describes."""
        return self.rehearsal is not None and option in self.rehearsal.unproven

    def trust(self, rehearsal: Rehearsal) -> None:
        """Take the flips as verified, as far as a rehearsal has shown."""
        self.kept_constants = rehearsal.kept
        self.looks_after_flips = looks = "done" in rehearsal.unproven
        # The statement that flips a row does not see that a trigger has moved it elsewhere.
        self.flips_may_wait = not (rehearsal.has_rules or (looks and rehearsal.has_triggers))
        self.rehearsal = rehearsal
        self.counters.may_be_refused |= bool(rehearsal.refused)

    def verify(self, held: Held) -> None:
        """Try the flips on the run's first row, before the first handler of any lane."""
        with self._verifying:
            if self.rehearsal is None:
                found = rehearse(self.processor, self.source.question, held.row, held.pk)
                self.trust(found)

    def refuse_backlog(self, question: Question[Any], seen: Collection[Any] | None = None) -> None:
        """Raise ``TooManyPending`` before the first row; ``seen``: the keys of a window, if any."""
        most, self._most_pending = self._most_pending, None
        if most is not None:
            number = None if seen is None else len(seen)
            limits.refuse_backlog(self.processor.name, question, most, seen=number)

    def may_start(self, so_far: Ended, resource: Resource | None) -> bool:
        """Return whether one more handler of a batch may be called.

        ``so_far``: the outcomes of its batch, which are not counted yet. ``resource``: opened
        again if it has to be.
        """
        counters = self.counters
        if self.is_interrupted or self.has_failed or counters.streak.ends_the_run:
            return False
        if self.limits.exceeded(counters.handled):
            return False
        if self.slot is not None and not self.slot.is_held():
            return False
        if self.overseer is not None and self.overseer.must_stop():
            return False
        if so_far and counters.is_to_be_careful:
            return False
        if so_far and isinstance(so_far[-1][1], Failed | Lost):
            outcomes = {held.pk: outcome for held, outcome in so_far if outcome is not None}
            if counters.fails_too_often(outcomes):
                return False
        return resource is None or not so_far or resource.ready()

    @property
    def is_over(self) -> bool:
        """Whether it was decided that no row starts any more."""
        return self.stopped is not None or self.is_interrupted or self.has_failed

    def must_stop(self) -> bool:
        """Return whether no row may start any more. Once stopped, it stays so."""
        if self.stopped is not None or self.is_interrupted or self.has_failed:
            return True
        if self.counters.streak.ends_the_run or self._open_failure.error is not None:
            self.stopped = "failures"
        else:
            self.stopped = self.limits.exceeded(self.counters.handled)
        if self.stopped is None and self.slot is not None:
            self.stopped = self._without(self.slot)
        if self.stopped is None and self.overseer is not None:
            self.stopped = self._held_by(self.overseer)
        return self.stopped is not None

    def _without(self, slot: Slot) -> Stopped | None:
        """Return why no row may start, if all slots are taken.

        A slot that was lost is taken again when no row is in flight any more.
        """
        return None if slot.is_held() or self.source.is_busy or slot.take() else "busy"

    # --- what may keep rows from starting besides

    def oversee(self) -> None:
        """Let the ledger oversee the run; raise ``Unsupported`` if it has to, and there is none."""
        self.overseer = oversight.of_run(self.processor, self.counters, hands_out=self.hands_out)
        if self.overseer is None:
            refuse_without_ledger(self.processor)

    def is_held_back(self) -> bool:
        """Return whether the run ends before it has looked for rows."""
        if self.overseer is not None:
            self.stopped = self._held_by(self.overseer)
        return self.stopped is not None

    def _held_by(self, overseer: oversight.Overseer) -> Stopped | None:
        """Return why no row may start any more; wait until rows may start, if that is soon."""
        while (hold := overseer.hold()) is not None:
            if hold.wait is None or hold.wait > self.longest_hold:
                return hold.stopped
            if self.source.is_busy:
                return None  # it starts no row, and waits for the end of these
            self.limits.pause(hold.wait)
            if reason := self.limits.exceeded(self.counters.handled):
                return reason
        return None


# --- the dry run: without a call of a handler, and without a change


#: Rows of which the primary keys are shown, and one of which is to be free for the rehearsal.
SHOWN = 5


def dry_run(run: Run) -> DryRun:
    """Return what the run would do; raise what it would raise before its first handler."""
    processor = run.processor
    try:
        question = run.checked()
        run.make_source(question)  # which refuses what cannot be a key
        pending = scan.count(question, MOST_COUNTED)
        found = DryRun(name=processor.name, pending=pending, limit=run.limits.rows)
        walk = scan.ordered_scan if is_ordered(question.queryset) else scan.KeyScan
        window = next(iter(walk(run.ask, set())), None)
        if window is None:
            return found
        question, waiting = window
        run.refuse_backlog(question, waiting)
        if processor.group_by is not None:
            refuse_collation(question, groups_of(processor, question.model), processor.name)
        return replace(
            found,
            due=scan.count(question, MOST_COUNTED),
            first=tuple(islice(waiting, run.limits.clip(SHOWN, 0))),
            **_rehearsed(run, question, list(islice(waiting, SHOWN))),
        )
    finally:
        run.leave()


def _rehearsed(run: Run, question: Question[Any], pks: Sequence[Any]) -> dict[str, Any]:
    """Try the flips on the first of the rows that is free; return what the dry run says of it."""
    processor, session = run.processor, Session(question.using, run.processor.name)
    error: Exception | None = None
    for pk in pks:
        try:
            for held in claim(session, question, Wanted([pk])).rows:
                if refused := rehearse(processor, question, held.row, pk).refused:
                    return {"refused": refused}
                return {"rehearsed": None if processor._flip_needs_result else pk}
        except RowRefused as refusal:
            error = error or refusal.error
        finally:
            session.rollback()
    if error is not None:
        raise error
    return {}
