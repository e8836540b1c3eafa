"""A lane: one session's way through the candidates. The loop of the package is ``drive()``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.utils import timezone

from dcl_processor import log_fields, observers
from dcl_processor import steady as time
from dcl_processor.definition.kinds import rules_of
from dcl_processor.execution.leftover import Leftover, close_lost
from dcl_processor.execution.row_savepoint import RowSavepoint
from dcl_processor.interrupts import ends_the_run
from dcl_processor.runner.in_flight import InFlight

from . import marking, recovery, settling
from .claim import claim
from .deliveries import DELIVERIES, Deliver
from .flips import fixed_flip
from .key_claim import claim_in_turn
from .marked import LINGER, WORTH_CLAIMING, BatchCalls
from .marking import claim_and_mark
from .session import Session
from .settlement import Batch, Held, NotSettled, Settlement, mark_of
from .source import LOOK
from .work import read_attempts

if TYPE_CHECKING:
    from dcl_processor.candidates.question import Question

    from .run import Run
    from .settlement import Mark

logger = logging.getLogger("dcl_processor")

#: Claims, one after the other, for which the database lacks the time or the room, after which it
#: would lack it for every row.
MOST_REFUSED = 10


class Lane:
    """Delivers batches, one after another, on one session; a run has one lane for each thread.

    ``deliver``: instead of the processor's delivery.
    """

    def __init__(self, run: Run, deliver: Deliver | None = None) -> None:
        self.run = run
        self.processor, self._name = run.processor, run.processor.name
        self.source = run.source
        self.resource = run.make_resource()
        self.in_flight = InFlight(run.notes)
        self.session = Session(run.using, self._name)
        self._loop = run.event_loop
        #: Whether ``BatchCalls`` call the handlers of rows with a mark.
        self.calls_apart = self._loop is not None or (
            self.processor._handles_batches and not run.hands_out
        )
        self._size = run.size
        self._deliver = deliver or DELIVERIES[run.processor.delivery]
        retry, since = self.processor.retry, self.processor.pending_since
        #: The column by which observers learn for how long a row was pending, if there is one.
        self._since = since if isinstance(since, str) else None
        #: Whether a handler's call notes the number of its attempt.
        self.counts_attempts = retry is not None
        #: The flip, if it is the same for all rows.
        self.fixed_flip = fixed_flip(self.processor)
        self.savepoint = RowSavepoint(self.session.connection)
        #: Watches what handlers leave open that work outside a transaction.
        is_marked = not rules_of(self.processor).in_transaction
        self.leftover = Leftover(run.using, is_marked=is_marked)
        self.watched = self.leftover if self.leftover.watches else nullcontext(self.leftover)
        self._mark: Mark | None = None
        flip = {} if self.processor.lease is not None else self.processor.done
        written = self.processor.claim or flip or {}
        self._has_fixed_mark = not any(map(callable, written.values()))
        #: The last question by which one statement claims, checks and marks.
        self.simple_question: Question[Any] | None = None
        #: Batches with rows whose handlers have not ended, or whose settlement is tried again.
        self._open: list[Batch] = []
        #: Whether the server was there before the last handler, or came back in time.
        self.has_server = True
        #: Whether no asynchronous handler has ended for a while.
        self._is_idle = False
        #: Claims that were refused since the last one that was not.
        self._refused = 0
        #: What the last batch still has to send.
        self._after: Settlement | None = None
        #: The driver's connection before the delivery at hand.
        self.driver: Any = None

    def drive(self) -> None:
        """Deliver rows until none is left."""
        try:
            while True:
                while batch := self.source.take(self._room() if self._loop else self._size):
                    self.deliver(batch)
                    if self._open:
                        self.go_on()
                if not self.source.refill(waits=not self._open) and not self._open:
                    return
                self.go_on(pause=LOOK)
        except BaseException as error:
            if ends_the_run(error):
                self.run.is_interrupted = True
            else:
                self.run.has_failed = True
                self._let_end()
            raise
        finally:
            with ExitStack() as steps:  # in reverse order, each of them
                steps.callback(self.in_flight.close)
                steps.callback(self.resource.close)
                steps.callback(self.session.rollback)
                steps.callback(self.leftover.unwatch)
                steps.callback(self._clear_up_all)
                steps.callback(self.settle)

    def _room(self) -> int:
        """Return how many rows the next batch of asynchronous handlers may have."""
        loop, size = self._loop, self._size
        assert loop is not None
        # The others may be at work for hours, and a free place is to be used.
        enough = 1 if self._is_idle else int(loop.concurrency * WORTH_CLAIMING) or 1
        waiting = [batch for batch in self._open if batch.calls is not None and batch.calls.wait]
        if loop.free < enough or waiting:
            return 0
        return max(size, loop.free)

    def _let_end(self) -> None:
        """Let asynchronous handlers end, and rows be settled, after an error that is no interrupt.

        The error may be the restart of a server, and what is done is settled when it is back.
        """
        with suppress(Exception):
            self.settle()
            while self._open:
                self.go_on(pause=LOOK)

    def deliver(self, batch: Batch) -> None:
        """Claim, handle, flip and count a batch."""
        is_open = self.resource.is_open
        if self._loop is None and not self.run.counters.streak.goes_well:
            close_lost(but=self.run.using)
        self.driver = self.session.connection.connection
        self._is_idle = False
        try:
            if not (is_open or self.resource.ready()):
                self.source.give_back(batch)
                return
            self._after = self._deliver(self, batch)
        except BaseException as error:  # noqa: BLE001  # raised again if it ends the run
            recovery.recover(self, batch, error)
        finally:
            if self._loop is None:
                self.in_flight.forget()
            else:
                self._note_under_way()
        self.settle()

    def _note_under_way(self) -> None:
        """Note the rows that are still in flight when a batch was delivered, or has ended."""
        loop = self._loop
        if loop is not None and self.in_flight.notes.using and (rows := loop.rows_under_way):
            self.in_flight.note(rows)
        else:
            self.in_flight.forget()

    def claim(self, batch: Batch) -> None:
        """Lock the batch's rows, and check them again."""
        make = claim_in_turn if batch.wanted.keys else claim
        batch.claimed = make(self.session, batch.question, batch.wanted)
        self.source.note_claim(batch)
        self._refused, rows = 0, batch.claimed.rows
        if rows:
            if self.counts_attempts:
                read_attempts(self.processor, batch.question, rows)
            if self.run.rehearsal is None:
                self.run.verify(rows[0])
        if observers.active and rows:
            batch.claimed_at = time.monotonic()
            ages = pending_ages(self._since, rows) if self._since else ()
            observers.tell("claimed", self._name, ages)

    def claim_and_mark(self, batch: Batch) -> None:
        """Lock the batch's rows, check them again, mark them, and commit."""
        began = time.monotonic()
        if self.leftover.may_be_left() and self.leftover.end():
            self._tell_of_leftover()
        batch.mark = mark = self._mark or self._mark_of(batch)
        claim_and_mark(self, batch, mark)
        # Not the batch's own "rows", which is one more call for each row.
        self._refused, rows = 0, () if batch.claimed is None else batch.claimed.rows
        if rows:
            self.hold(batch, began)
            if self.counts_attempts:
                read_attempts(self.processor, batch.question, rows)
            if observers.active:
                ages = pending_ages(self._since, rows) if self._since else ()
                observers.tell("claimed", self._name, ages)
                observers.tell("unlocked", self._name, time.monotonic() - began)

    def may_go_on(self) -> bool:
        """Return whether there may be time, and room, for other rows, after a refused claim."""
        self._refused += 1
        return self._refused < MOST_REFUSED

    def hold(self, batch: Batch, since: float) -> None:
        """Take note that the marks are committed, and begin to renew those that are leases.

        ``since``: when the claim began, by this process's monotonic clock.
        """
        batch.is_marked = True
        if self.run.heartbeat is not None:
            assert batch.claimed is not None
            claimed = {held.pk: held.marked.after for held in batch.claimed.rows}
            self.run.heartbeat.hold(batch.question, claimed, since)

    def _mark_of(self, batch: Batch) -> Mark:
        mark = mark_of(self.processor, batch.question.model)
        if self._has_fixed_mark:
            self._mark = mark
        return mark

    def is_one_statement(self, batch: Batch) -> bool:
        """Return whether rows are claimed, checked and marked by one statement."""
        question, mark = batch.question, batch.mark
        if question is self.simple_question:
            return True
        assert mark is not None
        # A rule turns it into several. A row that it does not return may be locked, or its mark may
        # be dropped by a trigger: several statements, when the run comes back to it, show which.
        if self.run.has_rules or self.source.is_returning:
            return False
        if self.run.needs_check(mark.option) or not marking.suits(question):
            return False
        self.simple_question = question
        return True

    def _tell_of_leftover(self) -> None:
        name = self._name
        message = "%s: a transaction that a handler left open was rolled back"
        log_fields.log(logger, logging.WARNING, message, name, extra=log_fields.fields(name))

    def settle(self) -> None:
        """Send what the last batch has left to send, and count what is true then."""
        after = self._after
        if after is None:
            return
        if after.answers is None:
            try:
                self.session.settle(after)
            except NotSettled as error:
                self._failed(error)
                return
        self.count(after)

    def count(self, after: Settlement) -> None:
        """Count the rows of a batch whose settlement was committed."""
        batch = after.batch
        if batch.claimed_at is not None:
            seconds, batch.claimed_at = time.monotonic() - batch.claimed_at, None
            observers.tell("unlocked", self._name, seconds)
        if batch.mark is not None:
            self.finish(batch)
        else:
            if batch.unrecorded:
                recovery.record(self, batch)
            self.source.end(batch)
        if after is self._after:
            self._after = None

    def finish(self, batch: Batch) -> None:
        """Count the rows of a batch, unless some are still to be handled, or to be settled."""
        if batch.mark is None:
            self.source.end(batch)
            return
        # Before its rows go on: an interrupt at any point of that leaves the batch to the clear-up.
        if batch not in self._open:
            self._open.append(batch)
        if self.calls_apart and batch.calls is None and not batch.ended:
            batch.calls = BatchCalls(self, batch)
        calls = batch.calls
        has_ended = calls is None or calls.go_on()
        if not (settling.settle_ended(self, batch) and has_ended):
            self.source.settled(batch)
        else:
            self.source.end(batch)
            self._open.remove(batch)
            if calls is not None:
                batch.calls = None  # or they would refer to each other
                self._note_under_way()

    def clear_up(self, batch: Batch) -> None:
        """Settle what is left of a batch with marks, as far as an interrupt leaves time for it."""
        calls, batch.calls = batch.calls, None
        with ExitStack() as steps:  # in reverse order, each of them
            steps.callback(self.source.end, batch)
            steps.callback(settling.clear_up, self, batch)
            if calls is not None:
                steps.callback(calls.close)

    def _clear_up_all(self) -> None:
        with ExitStack() as steps:  # each of them
            if self._loop is not None and self._open:
                self._loop.give_up()  # so that all of them end at the same time
            for batch in self._open:
                steps.callback(self.clear_up, batch)

    def go_on(self, *, pause: float = 0.0) -> None:
        """Go on with the batches that are open; wait up to so many seconds before that."""
        if not self._open:
            return
        if pause:
            self._pause(pause)
        for batch in [*self._open]:
            if self.run.is_interrupted or self.run.limits.is_told_to_stop:
                settling.hurry(batch)
            self.finish(batch)

    def _pause(self, seconds: float) -> None:
        loop = self._loop
        if loop is None:
            time.sleep(seconds)
        else:
            may_linger = loop.free and self.source.has_candidates
            self._is_idle = not loop.wait(LINGER if may_linger else seconds)

    def _failed(self, error: NotSettled) -> None:
        """Find out what became of a settlement whose message failed."""
        after, self._after = self._after, None
        assert after is not None
        assert error.__cause__ is not None
        recovery.settle_alone(self, after, error.__cause__)


# --- how long rows were pending before their claim, as far as it can be known without a query


def pending_ages(since: str, rows: Iterable[Held]) -> list[float]:
    """Return the seconds since each row's time in a column, by this process's clock.

    Only where the rows were loaded with it; a row without a time has no age. A clock that differs
    from the database's gives no age below 0.
    """
    times = [vars(held.row).get(since) for held in rows]
    now = timezone.now().timestamp()
    return [max(0.0, now - each.timestamp()) for each in times if isinstance(each, datetime)]
