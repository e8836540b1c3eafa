"""Reservations: rows that were handed out, and how each of them ends."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Generic, Self, TypeVar

from django.db.models import Model, Q, QuerySet

import dcl_processor.contrib.reservations.hold as holds
from dcl_processor.contrib.reservations.handing_out import HandingOut, settled, written
from dcl_processor.engine.rows import Marks, Row
from dcl_processor.exceptions import InvalidOption, ReservationLost, Unsupported
from dcl_processor.options.options import Definition
from dcl_processor.pending.question import Question, ask, for_write
from dcl_processor.report.errors import add_note
from dcl_processor.report.interrupts import ends_the_run
from dcl_processor.report.outcomes import (
    Discard,
    Discarded,
    Failed,
    Handled,
    Lost,
    Outcome,
    Snooze,
    Snoozed,
    as_exception,
    judge,
    returned_error,
)
from dcl_processor.report.values import expect_type, expect_whole_number
from dcl_processor.sql.isolation import refuse_outer_transaction

M = TypeVar("M", bound=Model)

#: Rows that are handed out at once.
MOST = 1_000


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
    run = HandingOut(processor, limit=limit, filter=filter, using=using)
    try:
        run.execute()
        return [_handed_out(processor, each.question, row, bound_to) for each, row in run.handed]
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
    processor: Definition[M], question: Question[M], row: Row, bound_to: str | None
) -> Reservation[M]:
    hold = holds.hold_of(processor, question.using, row)
    token = holds.sign(processor, question.model, hold, bound_to)
    return Reservation(processor, question, hold, token=token, row=row.instance)


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
        hold: holds.Hold,
        *,
        token: str,
        row: M | None = None,
    ) -> None:
        self._processor, self._question, self._hold = processor, question, hold
        self._row, self._is_over = row, False
        self._expires_at: datetime | None = None
        #: What identifies the reservation in another process; it survives ``renew()``.
        self.token = token

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
        error = returned_error(result)
        self._end_as(Handled(result) if error is None else judge(error))

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
        self._end(None)

    def renew(self) -> None:
        """Renew the lease, which then ends one to two durations from now.

        Does nothing for a claim, which does not lapse.
        """
        refuse_outer_transaction(self._question.using, self._processor.name)
        found = self._look()
        if self._processor.lease is None:
            return
        end, expected = holds.renewed(self._hold, found), self._expected(found)
        # Race: lost lease that writes. Another worker may have taken the row over since it was
        # read.
        values = {self._processor.lease.field: end}
        if not written(self._processor, self._question, self._hold, values, expected):
            raise self._lost()
        self._expires_at = end

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
        """End the reservation; raise if the processor has no such outcome, or cannot write it."""
        final = self._end(outcome)
        if isinstance(final, Failed) and not isinstance(outcome, Failed):
            raise final.error

    def _end(self, outcome: Outcome | None) -> Outcome | None:
        """Settle the row; return the final outcome. ``None``: the row is put back."""
        refuse_outer_transaction(self._question.using, self._processor.name)
        # Race: lost lease that writes. The row is written only if it still has the time that was
        # just read, or that of a renewal of this reservation since.
        row = self._marked(self._look())
        final = settled(self._processor, self._question, self._hold, row, outcome)
        if isinstance(final, Lost):
            raise self._lost()
        self._is_over = True
        return final

    def _marked(self, found: holds.Found) -> Row:
        """Return the row as it is after its claim."""
        processor, retry, counted = self._processor, self._processor.retry, self._hold.attempts
        before = dict(Marks(processor).make(self._question.model).undone or {})
        if retry is not None and counted is not None:
            before[retry.attempts] = counted - 1
        # A claim that is no lease counts no attempt: its failure does.
        attempt = found.attempts + (processor.lease is None)
        expected = self._expected(found)
        return Row(self._hold.pk, self.row, attempt=attempt, before=before, expected=expected)

    def _expected(self, found: holds.Found) -> dict[str, Any]:
        return {**holds.expected(self._processor, self._hold, found)}

    def _look(self) -> holds.Found:
        found = holds.look(self._processor, self._question, self._hold)
        if found is None:
            raise self._lost()
        return found

    def _load(self) -> M:
        """Read the row, which a claim may have taken out of ``pending``."""
        given: Any = self._question.unfiltered
        rows: Any = for_write(QuerySet(given.model, using=self._question.using))
        rows = rows.prefetch_related(*given._prefetch_related_lookups).filter(pk=self._hold.pk)  # noqa: SLF001
        rows.query.select_related = given.query.select_related
        rows.query.deferred_loading = given.query.deferred_loading
        # A save() would write back the lease, which has been renewed since.
        lease = self._processor.lease
        for row in rows if lease is None else rows.defer(lease.field):
            found: M = row
            return found
        raise self._lost()

    def _lost(self) -> ReservationLost:
        reason = holds.why_lost(self._processor, self._question, self._hold)
        lost = ReservationLost(self._processor.name, self._hold.pk, reason)
        lost.of = self
        return lost

    def __repr__(self) -> str:
        # Without the token, which is the right to settle the row.
        return f"<{type(self).__name__} of {self._processor.name}: row {self._hold.pk}>"
