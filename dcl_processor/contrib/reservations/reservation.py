"""Rows handed to a caller, who handles them and settles them, perhaps in another process."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from django.db.models import Model, Q

from dcl_processor.candidates.question import Question, ask
from dcl_processor.engine.settlement import Batch, Held
from dcl_processor.engine.settling import release, settle_now
from dcl_processor.errors import add_note
from dcl_processor.exceptions import InvalidOption, ReservationLost, Unsupported
from dcl_processor.execution.calls import entered
from dcl_processor.execution.handler import (
    Discarded,
    Failed,
    Lost,
    Outcome,
    Snoozed,
    as_exception,
    judge,
    returned,
)
from dcl_processor.interrupts import ends_the_run
from dcl_processor.locking.isolation import refuse_outer_transaction
from dcl_processor.outcomes import Discard, Snooze
from dcl_processor.runner.counters import Counters
from dcl_processor.values import expect_type, expect_whole_number

from . import hold as holds
from .handing_out import HandingOut, lane_of

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

M = TypeVar("M", bound=Model)

#: Rows that are handed out at once.
MOST = 1_000

#: How often a write is tried again because a renewal of the same reservation came in between.
TRIES = 10


def reserve(
    processor: Definition[M],
    limit: int,
    *,
    filter: Q | None,
    using: str | None,
    bound_to: str | None,
) -> list[Reservation[M]]:
    """Claim and mark up to ``limit`` rows, and return them."""
    _check(processor, bound_to, "reserve()")
    named = f"{processor.name}: expected reserve()'s limit"
    expect_whole_number(named, limit, of="rows", least=1, most=MOST)
    with entered(processor):
        run = HandingOut(processor, limit=limit, filter=filter, using=using)
        try:
            run.hand_out()
            return [_handed_out(processor, batch, held, bound_to) for batch, held in run.handed]
        except BaseException:
            run.take_back()
            raise


def from_token(processor: Definition[M], token: str, *, bound_to: str | None) -> Reservation[M]:
    """Return the reservation of a token; sends no query."""
    _check(processor, bound_to, "reservation()")
    signed = holds.unsign(processor, token, bound_to)
    question: Question[M] = ask(processor.pending, label=processor.name, using=signed.using)
    hold = holds.of_model(processor, question.model, signed)
    return Reservation(processor, question, hold, token=token)


def _handed_out(
    processor: Definition[M], batch: Batch, held: Held, bound_to: str | None
) -> Reservation[M]:
    question, hold = batch.question, holds.hold_of(processor, batch, held)
    token = holds.sign(processor, question.model, hold, bound_to)
    return Reservation(processor, question, hold, token=token, held=held)


def _check(processor: Definition[Any], bound_to: Any, method: str) -> None:
    if processor.lease is None and not (processor.claim and processor.claimed_at):
        raise Unsupported(
            f"{processor.name}: expected a processor with a lease, or with claim=… and "
            f"claimed_at=…, for {method}, got {processor.delivery} without them, with which no row "
            "shows to whom it was handed out; choose AT_LEAST_ONCE, or add them to AT_MOST_ONCE."
        )
    if bound_to is not None:
        expect_type(f"{processor.name}: expected bound_to", bound_to, str, "a string, or None")


class Reservation(Generic[M]):
    """A row that was handed out, and that only this reservation may settle.

    Each method that ends it writes only if the row is still this reservation's, and commits; it
    raises ``ReservationLost`` otherwise, and ``InsideTransaction`` inside ``atomic()``. A lease
    that has lapsed does not matter as long as no other worker has taken the row over.

    As a context manager it settles the row at the end of the block, unless that was done in it. An
    exception in the block fails the row, and is raised again; ``Snooze`` and ``Discard`` are
    outcomes as in a handler, and end the block.
    """

    def __init__(
        self,
        processor: Definition[M],
        question: Question[M],
        hold: holds.HandOut,
        *,
        token: str,
        held: Held | None = None,
    ) -> None:
        self._processor = processor
        self._question = question
        self._hold = hold
        self._row: M | None = None
        self._expires_at: datetime | None = None
        self._is_over = False
        #: What identifies the reservation in another process; it survives ``renew()``.
        self.token = token
        if held is not None:
            self._row = held.row
            if processor.lease is not None:
                self._expires_at = held.marked.after[processor.lease.field]

    @property
    def row(self) -> M:
        """The row, as it was when it was handed out; from a token, as it is at the first use.

        From a token it lacks the annotations of ``pending``.
        """
        if self._row is None:
            self._row = self._load()
        return self._row

    @property
    def expires_at(self) -> datetime | None:
        """When the lease lapses, by the database's clock; ``None`` for a claim, which does not."""
        if self._expires_at is None and self._processor.lease is not None:
            self._expires_at = self._look().time
        return self._expires_at

    def settle(self, result: Any = None) -> None:
        """Write ``done``; ``result``: what a handler would have returned, or an exception.

        Raises the error of a flip that cannot be written, or that leaves the row pending; it is the
        row's failure.
        """
        outcome = returned(result, None)
        if isinstance(outcome, Failed):
            self._end(outcome)
        else:
            self._end_as(outcome)

    def fail(self, error: BaseException) -> None:
        """Write what a handler's exception would: the ``retry``'s columns, or ``failed``."""
        expect_type("expected fail() to get", error, BaseException, "an exception")
        self._end(Failed(as_exception(error)))

    def snooze(self, delay: float | timedelta | None = None) -> None:
        """Put the row back until later, without an attempt; ``delay``: as for ``Snooze``."""
        self._end_as(Snoozed(Snooze(delay=delay).delay))

    def discard(self, reason: str) -> None:
        """Write ``failed``, because no further attempt would help."""
        self._end_as(Discarded(Discard(reason)))

    def release(self) -> None:
        """Put the row back as it was before, with its attempt, because nothing was done.

        Raises ``InvalidOption`` if the processor has neither a lease nor ``reset``.
        """
        if self._processor.lease is None and self._processor.reset is None:
            raise InvalidOption(
                f"{self._processor.name}: expected reset=… for release(), got none, so the row "
                "stays claimed; set reset to the values that put a row back into pending."
            )
        for _ in range(TRIES):
            if release(lane_of(self._processor, self._question), self._batch()):
                self._is_over = True
                return
        raise self._lost()

    def renew(self) -> None:
        """Renew the lease, which then ends one to two durations from now.

        Does nothing for a claim, which does not lapse.
        """
        refuse_outer_transaction(self._question.using, self._processor.name)
        for _ in range(TRIES):
            found = self._look()
            if self._hold.duration is None:
                return
            end = holds.renew(self._processor, self._question, self._hold, found)
            if end is not None:
                self._expires_at = end
                return
        raise self._lost()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self._is_over or (isinstance(error, ReservationLost) and error.of is self):
            return False
        if error is None:
            self.settle()
            return False
        try:
            return self._end_by(error)
        except ReservationLost as lost:
            add_note(error, str(lost))
            return False

    def _end_by(self, error: BaseException) -> bool:
        """End the reservation by an exception of its block; return whether that was an outcome."""
        if ends_the_run(error):
            # As in a run: without a lease the row stays claimed, because its work has begun.
            if self._processor.lease is not None:
                self.release()
            return False
        outcome = judge(error)
        if isinstance(outcome, Failed):
            self._end(outcome)
            return False
        self._end_as(outcome)
        return True

    def _end_as(self, outcome: Outcome) -> None:
        """End the reservation; raise if the processor has no such outcome."""
        final = self._end(outcome)
        if isinstance(final, Failed):
            raise final.error

    def _end(self, outcome: Outcome) -> Outcome:
        """Settle the row, log its failure, and send the signal; return the final outcome."""
        for _ in range(TRIES):
            lane, batch = lane_of(self._processor, self._question), self._batch()
            # Race: lost lease that writes. The row is written only if it still has the time that
            # was just read. A renewal in between, by the same agent, is a reason to read it again.
            final = settle_now(lane, batch, outcome)
            if not isinstance(final, Lost):
                self._is_over = True
                Counters(self._processor).count(self._hold.pk, final)
                return final
        raise self._lost()

    def _batch(self) -> Batch:
        """Return the batch of this row; raise ``ReservationLost`` if it is no longer holds."""
        refuse_outer_transaction(self._question.using, self._processor.name)
        found = self._look()
        return holds.batch_of(self._processor, self._question, self._hold, self.row, found)

    def _look(self) -> holds.Found:
        found = holds.look(self._processor, self._question, self._hold)
        if found is None or not holds.is_held(self._hold, found):
            raise self._lost()
        return found

    def _load(self) -> M:
        """Read the row; a claim may have taken it out of ``pending``."""
        for row in self._question.bare(self._hold.pk).defer(*holds.deferred(self._processor)):
            return row
        raise self._lost()

    def _lost(self) -> ReservationLost:
        reason = holds.why_lost(self._processor, self._question, self._hold)
        lost = ReservationLost(self._processor.name, self._hold.pk, reason)
        lost.of = self
        return lost

    def __repr__(self) -> str:
        # Without the token, which is the right to settle the row.
        return f"<{type(self).__name__} of {self._processor.name}: row {self._hold.pk}>"
