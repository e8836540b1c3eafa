"""A run that hands its rows out: they are claimed and marked as in any run, and handled elsewhere.

It has no heartbeat, because the caller renews the lease of a row, and opens no resource.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Q

from dcl_processor.engine.calls import Call
from dcl_processor.engine.executors import Inline
from dcl_processor.engine.marked import settle_next
from dcl_processor.engine.rows import Batch, Row
from dcl_processor.engine.run import Run
from dcl_processor.engine.settle import PATIENCE, settle
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.question import Question
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report.outcomes import Outcome
from dcl_processor.report.values import Values
from dcl_processor.sql.steps import Wanted


class HandingOut(Run):
    """Hands out up to ``limit`` rows; ``handed``: these, with their batches."""

    def __init__(
        self,
        processor: Definition[Any],
        *,
        limit: int = 1,
        filter: Q | None = None,
        using: str | None = None,
    ) -> None:
        super().__init__(
            processor,
            filter=filter,
            using=using,
            limit=limit,
            timeout=None,
            wait_for_locked=0,
            concurrency=1,
            stop=None,
        )
        self.heartbeat = None
        self.handed: list[tuple[Batch, Row]] = []
        #: What became of the last row that was settled; ``None``: it was put back.
        self.outcome: Outcome | None = None

    def _executor(self) -> Inline:
        self.capacity = min(self.limits.rows or 1, WINDOW)
        return Inline(self.handler, self.resource, self._admitted)

    def submit(self, call: Call) -> None:
        """Hand the rows of a call out."""
        self.handed += [(call.batch, row) for row in call.rows]
        self.counters.handled += len(call.rows)
        self.source.end([row.pk for row in call.rows])

    def tally(self, pk: Any, outcome: Outcome) -> None:
        """Count a row that is over."""
        self.outcome = outcome
        super().tally(pk, outcome)

    def take_back(self) -> None:
        """Put the rows back, because an error keeps them from being handed to a caller."""
        for batch, row in self.handed:
            settle(self, batch, row, None)
        self.write()

    def write(self) -> None:
        """Write what was decided, or raise why that cannot be written now."""
        end = time.monotonic() + PATIENCE
        while self.unsettled:
            if time.monotonic() > end:
                each = self.unsettled.pop()
                raise each.error or TimeoutError("another session has the row locked")
            settle_next(self)


def settled(
    processor: Definition[Any],
    question: Question[Any],
    instance: Any,
    expected: Values,
    outcome: Outcome | None,
) -> Outcome | None:
    """Settle a row that was handed out, if it is as ``expected``; return what became of it.

    ``outcome``: ``None``: it is put back as it was before its claim, and so is the answer.
    """
    run = HandingOut(processor, using=question.using)
    run.prepare()
    try:
        run.source.question = question
        mark, pk, attempt = run.marks.make(question.model), instance.pk, 1
        before = dict(mark.undone or {})
        if processor.retry is not None:
            attempt = getattr(instance, processor.retry.attempts) or 0
            if mark.lease is None:
                attempt += 1  # such a claim counts none: its failure does
            else:
                before[processor.retry.attempts] = attempt - 1
        row = Row(pk, instance, attempt=attempt, before=before, expected=expected)
        settle(run, Batch(question, Wanted([pk], 1), mark=mark), row, outcome)
        run.write()
    finally:
        run.leave()
    return run.outcome
