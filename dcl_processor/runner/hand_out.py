"""A run that hands its rows out: they are claimed and marked as in any run, and handled elsewhere.

The run does everything before the handler: it reads the candidates, rehearses the flip, claims the
rows, and gives up on rows without attempts left. There is no handler, so there is no resource, no
event loop and no heartbeat: the caller renews the lease of a row that it got.

A run rehearses once for all its windows. Hand-outs are short, and often of one row, so those of one
process share a rehearsal for a minute.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from django.db.models import Model, Q

from dcl_processor.candidates.question import Question
from dcl_processor.candidates.scan import WINDOW
from dcl_processor.delivery import held
from dcl_processor.delivery.batch import Batch
from dcl_processor.delivery.heartbeat import Heartbeat
from dcl_processor.delivery.settle import put_back
from dcl_processor.exceptions import AttemptsUsedUp
from dcl_processor.execution.event_loop import EventLoop
from dcl_processor.execution.handler import Failed, HandedOut, Handled, Outcome
from dcl_processor.execution.resource import Resource
from dcl_processor.execution.time_limit import TimeLimit
from dcl_processor.log_fields import Running
from dcl_processor.report import Report
from dcl_processor.settlement.rehearsal import Rehearsal

from .counters import Counters
from .dispatch import Dispatcher, InlineDispatcher
from .run import Run

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

M = TypeVar("M", bound=Model)

#: Seconds for which a rehearsal is taken as that of later hand-outs.
TRUSTED = 60.0

#: When a processor was rehearsed on an alias, by this process's monotonic clock, and the result.
_rehearsed: WeakKeyDictionary[Definition[Any], dict[str, tuple[float, Rehearsal]]]
_rehearsed = WeakKeyDictionary()


class HandOut(Run[M]):
    """Hands out up to ``limit`` rows; ``handed``: their batches and keys."""

    def __init__(
        self, processor: Definition[M], *, limit: int, filter: Q | None, using: str | None
    ) -> None:
        self.handed: list[tuple[Batch[M], Any]] = []
        self._size = min(limit, WINDOW)
        # A ``save()`` elsewhere would write back the lease that its instance has loaded, which has
        # been renewed since. It skips deferred fields.
        self.deferred = held.deferred(processor)
        super().__init__(
            processor,
            filter=filter,
            using=using,
            limit=limit,
            max_failures=None,
            timeout=None,
            wait_for_locked=0,
            wait_for_slot=0,
            concurrency=1,
            stop=None,
        )
        self.context.hand_over = self._keep
        self.context.on_rehearsed = self._remember

    def _keep(self, batch: Batch[M], pk: Any) -> None:
        self.handed.append((batch, pk))

    def ask(self, *, due: bool = True, among: Q | None = None) -> Question[M]:
        question = super().ask(due=due, among=among)
        if self.context.rehearsal is None:
            since, known = _rehearsed.get(self.processor, {}).get(question.using, (0.0, None))
            if known is not None and time.monotonic() < since + TRUSTED:
                self.context.rehearsal = known
        self._alias = question.using
        return question

    def _remember(self) -> None:
        if self.context.rehearsal is not None:
            now = time.monotonic(), self.context.rehearsal
            _rehearsed.setdefault(self.processor, {})[self._alias] = now

    def take_back(self) -> None:
        """Put the rows back, because an error keeps them from being handed to anyone."""
        for batch, pk in self.handed:
            put_back(batch, pk)

    def make_counters(self, max_failures: int | None) -> Counters:
        return HandOutCounters(self.processor, max_failures)

    #: The caller gets no rows, and need not wait.
    longest_hold = 0.0
    hands_out = True

    def share(self, using: str) -> None:
        """Share nothing: ``max_workers`` counts runs, and these rows are handled elsewhere."""

    def make_event_loop(self, concurrency: int) -> EventLoop | None:  # noqa: ARG002  # as in Run
        return None

    def make_time_limit(self) -> TimeLimit | None:
        return None

    def make_resource(self) -> Resource:
        return _NoResource(self.processor, None, self.open_failure)

    def make_heartbeat(self) -> Heartbeat | None:
        return None

    def make_dispatcher(self, concurrency: int) -> Dispatcher:  # noqa: ARG002  # as in Run
        return InlineDispatcher(self.context, size=self._size, may_wait=lambda: False)

    def announce(self, running: Running) -> None:
        """Do nothing: the rows are still to be handled."""

    def log(self, report: Report) -> None:
        """Do nothing, as above."""

    def conclude(self, running: Running, report: Report, error: BaseException | None) -> None:
        """Do nothing, as above."""

    def send(self, report: Report) -> None:
        """Do nothing, as above."""


class HandOutCounters(Counters):
    """Counts the rows that were handed out, and only these, for the limit."""

    @property
    def is_to_be_careful(self) -> bool:
        return False  # no flip is written

    def count(self, pk: Any, outcome: Outcome) -> None:
        if isinstance(outcome, HandedOut):
            self.streak.note(Handled())
            self.handled += 1
            return
        handled, streak = self.handled, replace(self.streak)
        super().count(pk, outcome)
        self.handled = handled
        if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
            self.streak = streak  # it was given up on, and no handler failed


class _NoResource(Resource):
    """Has nothing to open."""

    @property
    def is_open(self) -> bool:
        return True

    def ready(self) -> bool:
        return True
