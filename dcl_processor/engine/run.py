"""One run: a loop that takes rows, delivers them, and reports what became of them."""

from __future__ import annotations

from datetime import timedelta
from threading import Event
from typing import Any

from django.db import connections
from django.db.models import Q

from dcl_processor.engine import limits as limits_
from dcl_processor.engine.calls import START, Call
from dcl_processor.engine.context import GATE_PAUSE, Context
from dcl_processor.engine.deliveries import DELIVERIES
from dcl_processor.engine.executors import Inline, Loop, Threads
from dcl_processor.engine.failing import isolate
from dcl_processor.engine.keyed import KeyedSource
from dcl_processor.engine.marked import put_back_unstarted, settle_call, settle_next
from dcl_processor.engine.refusals import refuse_options
from dcl_processor.engine.settle import write_settled
from dcl_processor.engine.source import Source
from dcl_processor.keys import columns
from dcl_processor.options import model_columns
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import ask
from dcl_processor.report import log
from dcl_processor.report.counters import attach_report, log_end
from dcl_processor.report.errors import ends_the_run
from dcl_processor.report.outcomes import Lost
from dcl_processor.report.report import Report
from dcl_processor.report.values import expect_whole_number
from dcl_processor.sql import isolation, messages
from dcl_processor.sql.session import Session


class Run(Context):
    """One call of ``run()``."""

    source: Source | KeyedSource

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
        limits_.check_alias(using or processor.using)
        limits_.check_filter(filter)
        concurrency = processor.concurrency if concurrency is None else concurrency
        most = limits_.MOST_TASKS if processor._is_async else limits_.MOST_THREADS
        expect_whole_number("expected concurrency", concurrency, of="handlers", least=1, most=most)
        limits = limits_.Limits(
            limit=limit, timeout=timeout, wait_for_locked=wait_for_locked, stop=stop
        )
        super().__init__(processor, limits, filter, using)
        self.concurrency = concurrency
        self._deliver = DELIVERIES[processor.delivery]

    def execute(self) -> Report:
        known = {"processor": self.processor.name, "run_id": self.observers.run_id}
        token = log.running.set(known)
        try:
            self.prepare()
            known["using"] = self.session.using
            return self._report_of_loop()
        finally:
            log.running.reset(token)

    def _report_of_loop(self) -> Report:
        using = self.session.using
        self.observers.run("started", using)
        try:
            self._loop()
        except BaseException as error:
            self.stopped = "signal" if ends_the_run(error) else "failures"
            attach_report(error, report := self._report())
            self.observers.run("ended", using, report=report, error=error)
            raise
        report = self._report()
        log_end(report)
        self.observers.run("ended", using, report=report)
        return report

    def _report(self) -> Report:
        return self.counters.report(self.stopped or "drained", self.failure)

    # --- before the first row

    def prepare(self) -> None:
        """Check what depends on the model and the connection, and set the stage."""
        processor = self.processor
        question = ask(processor.pending, label=processor.name, using=self._using)
        model_columns.check(processor, question.model)
        columns.refuse_order(processor, question.unfiltered)
        self.claims = columns.claims_of(processor, question.model, question.using)
        reads = columns.reads_of(processor, question.model, question.using)
        isolation.refuse_outer_transaction(question.using, processor.name)
        connection = connections[question.using]
        refuse_options(processor, connection, self.gates, self.concurrency)
        connection.ensure_connection()
        kind = messages.Messages if messages.suits(connection, question) else Session
        self.session = kind(question.using, processor.name)
        if processor.is_transactional:
            self.notes.begin()
        self.executor = self._executor()
        is_alone = self.concurrency == 1 and not processor._is_async
        query = question.queryset.query
        if reads is not None:
            self.source = KeyedSource(self, reads, processor.most_of_a_key)
            return
        self.source = Source(
            self,
            is_ordered=bool(query.order_by or query.extra_order_by),
            may_choose=is_alone and kind is messages.Messages,
        )

    def _executor(self) -> Inline | Threads | Loop:
        processor, handler = self.processor, self.handler
        size = self.concurrency
        if processor._is_async and not self.session.connection.in_atomic_block:
            self.capacity = size
            return Loop(handler, processor, self._admitted)
        self.capacity = size * processor.batch_size
        if size > 1 and not processor._is_async:
            return Threads(handler, processor, size, self._refused)
        return Inline(handler, self.resource, self._admitted)

    def _admitted(self, call: Call) -> Any:
        """As ``_refused()``; asked in the engine's thread, right before the handler is called."""
        answer = self._refused(call)
        if answer is START:
            call.context = self.announce(call.rows)
        return answer

    def _refused(self, call: Call) -> Any:
        """Return the result of marked rows that may not start; any thread may ask."""
        if self.limits.is_up() or self.is_closing or self.counters.fails_too_often:
            return None
        heartbeat = self.heartbeat
        if heartbeat is None or all(heartbeat.is_ours(row.pk) for row in call.rows):
            return START
        # Race: double claim. Another worker may have taken the row over.
        lost = {
            row.pk: None if heartbeat.is_ours(row.pk) else Lost(called=False) for row in call.rows
        }
        return lost if self.handler.is_batch else lost[call.rows[0].pk]

    # --- the loop

    def _loop(self) -> None:
        try:
            while True:
                batch = self.source.take(self.room)
                if batch is not None:
                    self._attempt(batch)
                elif self.calls or self.unsettled:
                    settle_next(self, GATE_PAUSE if self.is_held_back else None)
                else:
                    break
            self.source.finish()
            self._close(is_interrupted=False)
        except BaseException as error:
            # Also what interrupts the end of a run, which would leave threads and their sessions.
            is_interrupted = not isinstance(error, Exception) or ends_the_run(error)
            self._close(is_interrupted=is_interrupted)
            raise

    def _attempt(self, batch: Any) -> None:
        """Deliver a batch; an error is the failure of one of its rows."""
        if self.is_transactional and not self.resource.ready():
            self.source.put_back(batch.wanted.pks)
            return
        try:
            self._deliver(self, batch)
        except BaseException as error:
            if isinstance(error, Exception) and not ends_the_run(error):
                isolate(self, batch, error)
                return
            if self.is_transactional and self.session.has_committed:
                self.count(batch)  # a callback of the committed work was interrupted
            raise
        if self.is_transactional:
            self.count(batch)

    def leave(self) -> None:
        """End a run that has taken no row."""
        self.session.rollback()
        self.executor.close()
        self.notes.close()

    def _close(self, *, is_interrupted: bool) -> None:
        """End what is open; after an interrupt this is all that is done."""
        self.is_closing = True
        try:
            self.session.rollback()
            if self.calls:
                put_back_unstarted(self)
        finally:
            try:
                self.executor.close()
                while self.calls and (ended := self.executor.collect(0)):
                    settle_call(self, *ended)  # a thread's handler that has ended meanwhile
                write_settled(self)
                while self.unsettled and not is_interrupted:
                    settle_next(self)
            finally:
                if self.heartbeat is not None:
                    self.heartbeat.close()
                self.resource.close()
                self.notes.close()
