"""What the steps and the source of a run share: its processor, its session, and how far it is."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Sequence
from typing import Any

from django.db.models import Model, Q

from dcl_processor.engine import bookkeeping
from dcl_processor.engine.calls import Call, Handler
from dcl_processor.engine.executors import Executor, Threads
from dcl_processor.engine.heartbeat import Heartbeat
from dcl_processor.engine.limits import Limits, refuse_backlog
from dcl_processor.engine.poison import Notes
from dcl_processor.engine.resource import Resource
from dcl_processor.engine.rows import Batch, Row, Unsettled
from dcl_processor.keys.claim import Claims
from dcl_processor.options.options import Definition
from dcl_processor.options.retry import Retry
from dcl_processor.pending.question import Question, ask, with_known_statements
from dcl_processor.report.counters import Counters
from dcl_processor.report.exceptions import AttemptsUsedUp
from dcl_processor.report.observer import EndRun, Gates, Observers
from dcl_processor.report.outcomes import Failed, Handled, Outcome
from dcl_processor.report.report import Stopped
from dcl_processor.report.values import Values
from dcl_processor.sql.session import Session

#: Outcomes that wait to be written, with which a run claims no further rows.
MOST_UNSETTLED = 1_000

#: Seconds until gates that let no row in are asked again.
GATE_PAUSE = 0.1


class Context:
    """All state of a run is here, and none on the processor. Only the engine's thread uses it."""

    session: Session
    #: Gives the rows, and asks whether they may start.
    source: Any
    executor: Executor
    stopped: Stopped | None = None
    #: Models to which no flip was written yet: their rows are handled one at a time.
    unproven: set[type[Model]]

    def __init__(
        self, processor: Definition[Any], limits: Limits, filter: Q | None, using: str | None
    ) -> None:
        self.processor, self.limits = processor, limits
        self._filter, self._using = filter, using or processor.using
        self.observers = Observers(processor, uuid.uuid4().hex)
        self.gates = Gates(processor, self.observers)
        self.counters = Counters(processor, self.observers)
        self.handler = Handler(processor)
        self.resource = Resource(processor)
        lease = processor.lease
        self.heartbeat = None if lease is None else Heartbeat(lease, processor.name)
        #: The flip, if it is the same for all rows.
        self.fixed_flip: Values | None = bookkeeping.fixed_flip(processor)
        #: The notes of the rows at work, and what claims ask of the keys of rows.
        self.notes = Notes(processor.name)
        self.claims: Claims | None = None
        #: Calls of handlers that were handed out and have not ended, and rows that were decided.
        self.calls: set[Call] = set()
        self.unsettled: list[Unsettled] = []
        self._most_pending = processor.max_pending if limits.rows is None else None
        self.is_transactional = processor.is_transactional
        self.notes_failures = processor._notes_failures
        self.unproven = processor._identity.unproven
        self.capacity, self.concurrency = processor.batch_size, 1
        self.is_closing = self.is_eager = self.is_held_back = False

    def ask(self) -> Question[Any]:
        """Return the question for the next window."""
        question = ask(
            self.processor.pending,
            label=self.processor.name,
            filter=self._filter,
            using=self._using,
            due=self.processor._due,
            claims=self.claims,
            lease=None if self.processor.lease is None else self.processor.lease.field,
        )
        return with_known_statements(question, self.processor.name)

    def must_stop(self) -> bool:
        """Return whether no further row may start."""
        if self.stopped is None:
            self.stopped = self.limits.exceeded(self.counters.handled)
            if self.counters.fails_too_often or self.failure is not None:
                self.stopped = "failures"
        return self.stopped is not None

    @property
    def failure(self) -> BaseException | None:
        """Why no handler can be called any more, which is no row's fault."""
        parts: list[Any] = [self.resource, self.executor, self.heartbeat]
        return next((each.failure for each in parts if each and each.failure is not None), None)

    def let_in(self, room: int, in_flight: int) -> int:
        """Return how many rows may start now; waits while the gates let none start.

        ``is_held_back``: there are none, and rows in flight, whose ends the run waits for instead.
        """
        self.is_held_back = False
        if self.limits.rows is not None:
            room = min(room, self.limits.rows - self.counters.handled - in_flight)
        while room > 0 and self.gates.all:
            if self.must_stop():
                return 0
            try:
                if found := self.gates.may_start(room):
                    return found
            except EndRun as end:
                self.stopped = end.reason
                return 0
            if self.calls or self.unsettled:
                self.is_held_back = True
                return 0
            self.limits.pause(GATE_PAUSE)
        return room

    def announce(self, rows: Sequence[Row]) -> contextvars.Context | None:
        """Tell the observers that a handler is about to be called; return the context for it."""
        if not self.observers.of_rows:
            return None
        context = contextvars.copy_context()
        context.run(self._announce, rows)
        return context

    def _announce(self, rows: Sequence[Row]) -> None:
        since = self.processor.pending_since
        for row in rows:
            at = vars(row.instance).get(since) if isinstance(since, str) else None
            attempt = row.attempt if self.processor.retry is not None else None
            known = {"attempt": attempt, "since": at, "together": len(rows)}
            self.observers.row("started", row.pk, **known)

    def begin_window(self, question: Question[Any]) -> None:
        """Refuse a backlog."""
        if self._most_pending is not None:
            refuse_backlog(self.processor.name, question, self._most_pending)
            self._most_pending = None

    def tally(self, pk: Any, outcome: Outcome) -> None:
        """Count a row that is over, and tell the gates."""
        self.counters.count(pk, outcome)
        self.gates.ended([outcome])

    def may_go_on(self, batch: Batch) -> bool:
        """Return whether the next row of a batch may start, after those that have ended."""
        failed = refused = 0
        for _, outcome in reversed(batch.ended):
            if not isinstance(outcome, Failed):
                break
            failed, refused = failed + 1, refused + outcome.is_refused
        if failed == len(batch.ended):
            failed += self.counters.in_a_row
            refused += self.counters.refusals
        # After the first refusal the next row is taken alone, and elsewhere.
        ends = (
            refused
            or self.unproven
            or self.counters.is_too_many(failed)
            or self.counters.looks_bad(failed)
        )
        return not (ends or self.limits.is_up())

    def count(self, batch: Batch) -> None:
        """Count the rows of a batch whose transaction has ended."""
        again = [row.pk for row, outcome in batch.ended if outcome is None]
        ended = [(row.pk, outcome) for row, outcome in batch.ended if outcome is not None]
        left = [pk for pk, outcome in ended if type(outcome) is not Handled]
        for pk, outcome in ended:
            self.counters.count(pk, outcome)
        if len(left) < len(ended):
            self.unproven.clear()
        if self.gates.all:
            self.gates.ended([outcome for _, outcome in ended])
        self.source.end([pk for pk, _ in ended], left)
        if again:
            self.source.put_back(again)

    # --- rows whose handlers run outside the transaction

    @property
    def room(self) -> int:
        """The rows that the next claim may take."""
        if len(self.unsettled) > MOST_UNSETTLED:
            return 0
        if self.unproven:
            return 0 if self.calls or self.unsettled else 1
        capacity = self.capacity
        if not self.calls:
            return capacity
        in_flight = sum([len(call.rows) for call in self.calls])
        free, size = capacity - in_flight, min(self.processor.batch_size, capacity)
        if self.processor._is_async:
            # A slow handler holds up no others: rows are claimed when a quarter is free.
            return free if self.is_eager or free >= max(1, capacity // 4) else 0
        return size if free >= size else 0

    def submit(self, call: Call) -> None:
        """Give a call to the executor."""
        self.calls.add(call)
        if isinstance(self.executor, Threads):
            call.context = self.announce(call.rows)
        self.executor.submit(call)


def read_attempts(retry: Retry, question: Question[Any], rows: list[Row]) -> None:
    """Note of each row how often it was tried; one without attempts left gets an outcome.

    Before a handler can change the instances.
    """
    tried = _tried(question, rows, retry.attempts)
    for row in rows:
        row.attempt = (tried.get(row.pk) or 0) + 1  # NULL counts as 0
        if retry.max_attempts is not None and row.attempt > retry.max_attempts:
            row.refused = Failed(AttemptsUsedUp(retry.max_attempts))


def _tried(question: Question[Any], rows: list[Row], name: str) -> dict[Any, Any]:
    """Return the number of attempts of each row by its key, also if the column is deferred."""
    found = {}
    for row in rows:
        values = row.before if name in row.before else vars(row.instance)
        if name not in values:
            some = question.table.filter(pk__in=[each.pk for each in rows])
            return dict(some.values_list("pk", name))
        found[row.pk] = values[name]
    return found
