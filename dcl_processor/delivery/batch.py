"""The rows that one claim takes, and what their run gives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db.models import Model

from dcl_processor import observers
from dcl_processor.candidates.question import Question, these
from dcl_processor.exceptions import InvalidOption
from dcl_processor.execution.handler import Failed, Outcome, UsedUp
from dcl_processor.locking.claiming import Claimed, Miss
from dcl_processor.locking.row_transactions import RowTransactions
from dcl_processor.locking.wanted import Wanted
from dcl_processor.settlement.failure_columns import notes
from dcl_processor.settlement.rehearsal import Rehearsal, rehearse
from dcl_processor.values import Values

from .ages import pending_ages

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition
    from dcl_processor.execution.event_loop import EventLoop
    from dcl_processor.execution.failed_elsewhere import Elsewhere, FailedElsewhere
    from dcl_processor.execution.in_flight import InFlight
    from dcl_processor.execution.resource import Resource
    from dcl_processor.execution.time_limit import TimeLimit

    from .async_handlers import AsyncHandlers
    from .heartbeat import Heartbeat
    from .marks import MarkedRows

M = TypeVar("M", bound=Model)


@dataclass(eq=False, slots=True)
class Context:
    """What all deliveries of one run share.

    ``may_start``: whether one more handler may be called, given the outcomes of its batch so far.
    ``time_limit``: of plain handlers.
    ``rehearsal``: what the rehearsal of the flips has shown; ``None`` before the run's first row.
    ``elsewhere``: the rows that failed in other workers of the same run, if they can be known;
    ``called``: the keys for which they have called a handler that gets a key as a whole.
    ``on_rehearsed``: called when it has ended. ``on_confirmed``: called with a batch whose last
    statements waited, when it has ended, and with the error that interrupted it. ``hand_over``:
    called with a batch and the key of a marked row, instead of its handler, which is elsewhere.
    """

    processor: Definition[Any]
    resource: Resource
    in_flight: InFlight
    event_loop: EventLoop | None
    heartbeat: Heartbeat | None
    may_start: Callable[[dict[Any, Outcome]], bool]
    transactions: RowTransactions
    time_limit: TimeLimit | None = None
    rehearsal: Rehearsal | None = None
    elsewhere: FailedElsewhere | None = None
    called: Elsewhere | None = None
    on_rehearsed: Callable[[], None] | None = None
    on_confirmed: Callable[[Batch[Any], BaseException | None], None] | None = None
    hand_over: Callable[[Batch[Any], Any], None] | None = None

    def needs_check(self, option: str | None) -> bool:
        """Return whether each row is to be checked after the flip that this option describes."""
        return self.rehearsal is not None and option in self.rehearsal.unproven

    @property
    def trusts_flips(self) -> bool:
        """Whether a flip needs no check afterwards: the rehearsal has proved it for every row."""
        rehearsal = self.rehearsal
        return not (rehearsal is None or rehearsal.has_rules or self.needs_check("done"))

    def leave_thread(self) -> None:
        """Close what the handlers of this thread used, also if an interrupt ends a step."""
        with ExitStack() as steps:  # in reverse order
            steps.callback(self.in_flight.close)
            steps.callback(self.resource.close)
            steps.callback(self.transactions.close)


@dataclass(eq=False, slots=True)
class Batch(Generic[M]):
    """Candidates that go through the stages together.

    ``rows``: the claimed ones, and ``misses``: why others were not; ``is_claimed``: the claim has
    ended; ``transaction_id``: of its transaction, if known. ``attempts``: for each row, the number
    of this attempt, if a ``retry`` counts it; ``limits``: how many attempts each row has, if rows
    may have different numbers. ``started``: the rows whose handler was called; ``outcomes``:
    those of the handled rows. ``to_blame``: the row that makes the transaction roll back, if it is
    known. ``to_redo``: rows that have to be claimed again, each in a batch of its own. ``marked``:
    for a delivery that handles its rows after the claim is committed. ``handlers``: asynchronous
    handlers of the batch that go on after its delivery has returned. ``claimed_at``: when it was
    claimed, by the monotonic clock, if an observer wants to know how long its locks are held.
    ``window``: the number of the ``rate`` window whose tokens the batch has; unused tokens go back
    to that window.
    """

    context: Context
    question: Question[M]
    wanted: Wanted
    is_claimed: bool = False
    transaction_id: str | None = None
    rows: dict[Any, M] = field(default_factory=dict)
    misses: dict[Any, Miss] = field(default_factory=dict)
    attempts: dict[Any, int] = field(default_factory=dict)
    limits: dict[Any, int | None] = field(default_factory=dict)
    started: set[Any] = field(default_factory=set)
    outcomes: dict[Any, Outcome] = field(default_factory=dict)
    to_blame: Any = None
    to_redo: list[Any] = field(default_factory=list)
    marked: MarkedRows | None = None
    handlers: AsyncHandlers[M] | None = None
    is_counted: bool = False
    claimed_at: float | None = None
    window: int = 0
    processor: Definition[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.processor = self.context.processor

    @property
    def is_over(self) -> bool:
        """Whether no handler of the batch is in flight, or still to be started."""
        return self.handlers is None or self.handlers.are_over

    @property
    def is_unconfirmed(self) -> bool:
        """Whether its last statements wait to be sent with the next claim of this thread."""
        return self.context.transactions.unconfirmed is self

    def note_unlocked(self) -> None:
        """Let the observers know that the transaction with the locks of the rows has ended."""
        if self.claimed_at is not None and self.marked is None:
            seconds, self.claimed_at = time.monotonic() - self.claimed_at, None
            observers.tell("unlocked", self.processor.name, seconds)

    def is_ours(self, pk: Any) -> bool:
        """Return whether the lease of a claimed row is alive, as far as this process knows."""
        heartbeat = self.context.heartbeat
        return heartbeat is None or heartbeat.is_ours(pk)

    def take(self, claimed: Claimed[M]) -> None:
        """Store the claimed rows, before a handler changes them."""
        self.is_claimed, self.rows, self.misses = True, claimed.rows, claimed.misses
        self.transaction_id = claimed.transaction_id
        if observers.active and claimed.rows:
            self.claimed_at = time.monotonic()
            ages = pending_ages(self.processor, claimed.rows.values())
            observers.tell("claimed", self.processor.name, ages)
        elsewhere = self.context.elsewhere
        # Race: second try. The other worker has added the row before this one could claim it.
        if elsewhere is not None and (tried := set(elsewhere.among(claimed.rows))):
            self.rows = {pk: row for pk, row in claimed.rows.items() if pk not in tried}
            self.misses = {**claimed.misses, **dict.fromkeys(tried, Miss.TRIED)}
        if self.context.called is not None and self.rows:
            self._call_once(self.context.called)
        retry = self.processor.retry
        if retry is not None and retry.attempts is not None:
            # NULL counts as 0.
            self.attempts = {pk: (n or 0) + 1 for pk, n in self._column(retry.attempts).items()}

    def _call_once(self, called: Elsewhere) -> None:
        """Leave the rows of a key for which another worker has called the handler."""
        if self.wanted.key is None:
            return
        key = self.wanted.key.value
        # Race: second try. The key's lock, or its rows in flight, keep other workers out from here
        # until this call has ended, so that of two workers the later one finds the key.
        if called.among([key]):
            self.rows, self.misses = {}, dict.fromkeys(self.wanted.pks, Miss.CALLED)
        else:
            called.add(key)

    def _column(self, name: str) -> dict[Any, int | None]:
        if all(name in vars(row) for row in self.rows.values()):
            return {pk: getattr(row, name) for pk, row in self.rows.items()}
        # Deferred by the user's queryset: one query for all rows, instead of one per instance.
        table = self.question.table
        return dict(table.filter(these(self.rows)).values_list("pk", name))

    def rehearse(self) -> None:
        """Rehearse the flips on the first row that the run claims."""
        context = self.context
        if self.rows and context.rehearsal is None:
            pk, row = next(iter(self.rows.items()))
            context.rehearsal = rehearse(context.processor, self.question, row, pk)
            if context.on_rehearsed is not None:
                context.on_rehearsed()

    def read_limits(self) -> dict[Any, Outcome]:
        """Read how many attempts each row has, before a handler can change the instances.

        Returns, the first time, the outcomes of the rows that may not be handled: rows for which
        the ``max_attempts`` function raises, and rows that have no attempts left by its result.
        """
        retry, refused = self.processor.retry, dict[Any, Outcome]()
        assert retry is not None
        if self.limits:
            return refused
        if isinstance(retry.max_attempts, str):
            self.limits = self._column(retry.max_attempts)
            return refused
        for pk, row in self.rows.items():
            self.limits[pk] = None
            try:
                most = self.limits[pk] = retry.limit(row)
            except InvalidOption as error:
                named = InvalidOption(f"{self.processor.name}: {error}")
                named.__cause__ = error.__cause__
                refused[pk] = Failed(named, unstarted=True)
                continue
            # With a dead letter, the row is claimed to write it.
            if most is not None and self.attempts.get(pk, 1) > most and not self.processor.failed:
                refused[pk] = UsedUp()
        return refused

    def notes(self, pk: Any, outcome: Outcome, **undone: Values | None) -> tuple[Outcome, Values]:
        """Return the outcome to report for a row that was not handled, and the values to write.

        ``undone``: as in ``notes()``.
        """
        self.add_to_failed(pk)
        # Where none is counted, each attempt is the first.
        attempt, most = self.attempts.get(pk, 1), self._limit(pk)
        return notes(self.processor, self.rows[pk], outcome, attempt=attempt, most=most, **undone)

    def _limit(self, pk: Any) -> int | None:
        """Return how many attempts a row has; ``None``: there is no limit."""
        retry = self.processor.retry
        if retry is not None and retry.limit_varies:
            if pk not in self.limits:
                self.read_limits()
            return self.limits[pk]
        most: Any = None if retry is None else retry.max_attempts
        number: int | None = most
        return number

    def add_to_failed(self, pk: Any) -> None:
        """Let the other workers of the run know of a row that was not handled."""
        if self.context.elsewhere is not None:
            # Race: second try. The row is still locked or marked, so no other worker has it yet.
            self.context.elsewhere.add(pk)
