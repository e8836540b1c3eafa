"""What the steps of a run share: its processor, its session, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import Q

from dcl_processor.core.engine import bookkeeping
from dcl_processor.core.engine.calls import Call, Handler
from dcl_processor.core.engine.executors import Executor
from dcl_processor.core.engine.heartbeat import Heartbeat
from dcl_processor.core.engine.limits import Limits, refuse_backlog
from dcl_processor.core.engine.poison import Notes
from dcl_processor.core.engine.resource import Resource
from dcl_processor.core.engine.rows import Batch, Marks, Row, column
from dcl_processor.core.engine.slots import Slot
from dcl_processor.core.engine.source import Source
from dcl_processor.core.engine.verify import left_pending
from dcl_processor.core.options.options import Definition
from dcl_processor.core.pending.groups import Groups
from dcl_processor.core.pending.question import Question, ask
from dcl_processor.core.report import events
from dcl_processor.core.report.counters import Counters
from dcl_processor.core.report.exceptions import InvalidDone, InvalidOption
from dcl_processor.core.report.outcomes import Failed, UsedUp
from dcl_processor.core.report.report import Stopped
from dcl_processor.core.report.values import Values
from dcl_processor.core.sql.session import Session


class Context:
    """All state of a run is here, and none on the processor. Only the engine's thread uses it."""

    session: Session
    source: Source
    executor: Executor

    def __init__(
        self, processor: Definition[Any], limits: Limits, filter: Q | None, using: str | None
    ) -> None:
        self.processor, self.limits = processor, limits
        self._filter, self._using = filter, using or processor.using
        self.counters = Counters(processor)
        self.is_transactional = processor._in_transaction
        self.notes_failures = processor._notes_failures
        self.handler = Handler(processor)
        self.resource = Resource(processor)
        self.marks = Marks(processor)
        lease = processor.lease
        self.heartbeat = None if lease is None else Heartbeat(lease, processor.name)
        self.stopped: Stopped | None = None
        #: Whether the flips were tried on a row; whether that is still to be looked at.
        self.is_verified = False
        self.is_unproven = not processor.repeats and not processor._has_fixed_flip
        #: The flip, if it is the same for all rows.
        self.fixed_flip: Values | None = bookkeeping.fixed_flip(processor)
        #: The slot of ``max_workers``, and the notes of the rows at work.
        self.slot: Slot | None = None
        self.notes: Notes
        #: The rules for the keys of rows, if they are in groups.
        self.groups: Groups | None = None
        #: A settlement that is sent with the next claim.
        self.kept: Any = None
        #: Calls of handlers that were handed out and are not settled, and the rows that may be.
        self.calls: set[Call] = set()
        self.capacity, self.concurrency = processor.batch_size, 1
        self.is_closing = self.is_eager = False
        #: Rows that were handled since the last look, and their question.
        self._handled: list[Any] = []
        self._question: Question[Any] | None = None
        self._written = processor._written_columns()
        self._most_pending = processor.max_pending if limits.rows is None else None

    def ask(self, *, keyed: bool = True) -> Question[Any]:
        """Return the question for the next window; ``keyed``: only rows whose key is free."""
        return ask(
            self.processor.pending,
            label=self.processor.name,
            filter=self._filter,
            using=self._using,
            due=self.processor._due,
            flips=self._written,
            groups=self.groups if keyed else None,
        )

    def must_stop(self) -> bool:
        """Return whether no further row may start."""
        if self.stopped is None:
            self.stopped = self._reason()
        return self.stopped is not None

    def _reason(self) -> Stopped | None:
        if self.counters.fails_too_often or self.executor.failure is not None:
            return "failures"
        if self.slot is not None and self.slot.is_lost():
            return "busy"
        reason: Any = self.limits.exceeded(self.counters.handled)
        return reason or events.may_start(self.processor)  # type: ignore[return-value]

    def may_go_on(self, batch: Batch) -> bool:
        """Return whether the next row of a batch may start."""
        if not batch.ended:
            return True
        failed = 0
        for _, outcome in reversed(batch.ended):
            if not isinstance(outcome, Failed):
                break
            failed += 1
        if failed == len(batch.ended):
            failed += self.counters.in_a_row
        return not self.limits.is_up() and not self.counters.is_too_many(failed)

    def count(self, batch: Batch) -> None:
        """Count the rows of a batch whose transaction has ended."""
        again = [row.pk for row, outcome in batch.ended if outcome is None]
        ended = [(row.pk, outcome) for row, outcome in batch.ended if outcome is not None]
        for pk, outcome in ended:
            self.counters.count(pk, outcome)
        self.source.end([pk for pk, _ in ended])
        if again:
            self.source.put_back(again)

    # --- rows whose handlers run outside the transaction

    @property
    def room(self) -> int:
        """The rows that the next claim may take."""
        if not self.calls:
            return self.capacity
        in_flight = sum([len(call.rows) for call in self.calls])
        free, size = self.capacity - in_flight, self.processor.batch_size
        if self.processor._is_async:
            # A slow handler holds up no others: rows are claimed when a quarter is free.
            free = free // size * size if self.handler.is_batch else free
            return free if self.is_eager or free >= max(1, self.capacity // 4) else 0
        return size if free >= size else 0

    def submit(self, call: Call) -> None:
        """Give a call to the executor."""
        self.calls.add(call)
        self.executor.submit(call)

    # --- rows that are still pending after they were handled

    def begin_window(self, question: Question[Any], seen: int) -> None:
        """Look at the rows of the window before, and refuse a backlog."""
        if self._most_pending is not None:
            refuse_backlog(self.processor.name, question, self._most_pending, seen)
            self._most_pending = None
        self.look_at_handled()
        self._question = question
        if self.slot is not None and seen and not self.slot.take():
            self.stopped = "busy"

    def note_handled(self, pks: Sequence[Any]) -> None:
        """Take note of rows that have to have left ``pending``."""
        if not self.processor.repeats:
            self._handled += pks

    def look_at_handled(self) -> None:
        """End the run if a row that it has handled is still pending."""
        handled, self._handled = self._handled, []
        if not handled or self._question is None or self.session.is_open:
            return
        still = self._question.still_pending(handled).values_list("pk", flat=True)
        for pk in sorted({*still}, key=handled.index):
            # Race: endless run. The next run would handle it again.
            self.counters.revoke(pk, Failed(left_pending(self.processor, pk), handled=True))
            self.stopped = "failures"


def refuse_wrong_flips(run: Context, rows: list[Row]) -> None:
    """Let rows fail whose flip is a function of the row alone that gives none; no handler is called.

    Until a flip has been written: then the function is right.
    """
    processor = run.processor
    if not run.is_unproven or processor._flip_needs_result or not processor._writes("get_done"):
        return
    for row in rows:
        try:
            bookkeeping.given(processor, row.instance)
        except InvalidDone as error:
            row.refused = row.refused or Failed(error, handled=True)


def read_attempts(run: Context, question: Question[Any], rows: list[Row]) -> None:
    """Note of each row how often it was tried, and how often it may be.

    Before a handler can change the instances. A row whose limit is not known, or that has no
    attempts left, gets an outcome.
    """
    processor = run.processor
    retry = processor.retry
    if retry is None or not rows:
        return
    tried, limits, most = dict[Any, Any](), dict[Any, Any](), retry.max_attempts
    if retry.attempts is not None:
        name = retry.attempts
        marked = {row.pk: row.before[name] for row in rows if name in row.before}
        tried = marked or column(question, rows, name)
    if isinstance(most, str):
        limits = column(question, rows, most)
    for row in rows:
        row.attempt = (tried.get(row.pk) or 0) + 1  # NULL counts as 0
        if callable(most):
            _limit(processor, row)
        else:
            row.most = limits.get(row.pk) if isinstance(most, str) else most
        bounded = row.most is not None and (retry.bounds_attempts or not processor._in_transaction)
        if row.refused is None and bounded and row.attempt > (row.most or 0):
            row.refused = bookkeeping.used_up(processor, row)


def _limit(processor: Definition[Any], row: Row) -> None:
    """Ask the function for the row's limit; the row may get an outcome."""
    assert processor.retry is not None
    try:
        row.most = processor.retry.limit(row.instance)
    except InvalidOption as error:
        named = InvalidOption(f"{processor.name}: {error}")
        named.__cause__ = error.__cause__
        row.refused = Failed(named, unstarted=True)
        return
    # With a dead letter, the row is claimed to write it.
    lease = processor.lease
    has_died = lease is not None and row.before.get(lease.field) is not None
    is_given_up = processor.failed or (has_died and processor._has_dead_letter)
    if row.most is not None and row.attempt > row.most and not is_given_up:
        row.refused = UsedUp()
