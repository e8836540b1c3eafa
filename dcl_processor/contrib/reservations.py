"""Rows that are handed to a caller, who handles them and settles them, perhaps elsewhere.

The time that the claim has written to ``claimed_at`` identifies a hand-out: renewals of the lease
leave it as it is, and each other claim writes another one. The token of a reservation has this time
and the row's key, and is signed; its salt has the processor's name and ``bound_to``, so that tokens
of others are not valid.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Generic, TypeVar

from django.core import signing
from django.db.models import Model, Q, QuerySet

from dcl_processor.engine.calls import Call
from dcl_processor.engine.executors import Inline
from dcl_processor.engine.marked import settle_next
from dcl_processor.engine.rows import Batch, Row, mark_of_claim
from dcl_processor.engine.run import Run
from dcl_processor.engine.settle import PATIENCE, settle
from dcl_processor.exceptions import InvalidToken, LostBecause, ReservationLost, Unsupported
from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question, ask, for_write
from dcl_processor.pending.scan import WINDOW
from dcl_processor.report.outcomes import Failed, Handled, Lost, Outcome, judge, returned_error
from dcl_processor.report.values import Values, as_timedelta, constants_of, expect_whole_number
from dcl_processor.sql.isolation import refuse_outer_transaction
from dcl_processor.sql.steps import Wanted

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
    _refuse_unmarked(processor)
    named = f"{processor.name}: expected reserve()'s limit"
    expect_whole_number(named, limit, of="rows", least=1, most=MOST)
    run = HandingOut(processor, limit=limit, filter=filter, using=using)
    try:
        run.execute()
        return [
            _handed_out(processor, batch.question, row.instance, bound_to)
            for batch, row in run.handed
        ]
    except BaseException:
        run.take_back()
        raise


def from_token(processor: Definition[M], token: str, *, bound_to: str | None) -> Reservation[M]:
    """Return the reservation of a token."""
    _refuse_unmarked(processor)
    try:
        using, key, since = signing.loads(token, salt=_salt(processor, bound_to))
    except (signing.BadSignature, TypeError) as error:  # the latter of what is no text
        raise InvalidToken(
            f"{processor.name}: expected a token that reserve() gave out for this processor and "
            "this bound_to, got one that was changed, or given out elsewhere; reserve another row."
        ) from error
    question: Question[M] = ask(processor.pending, label=processor.name, using=using)
    rows: Any = for_write(QuerySet(question.unfiltered.model, using=using))
    for row in rows.filter(pk=question.model._meta.pk.to_python(key)):
        return Reservation(processor, question, row, datetime.fromisoformat(since), token)
    raise ReservationLost(processor.name, key, "gone")


def _handed_out(
    processor: Definition[M], question: Question[M], row: M, bound_to: str | None
) -> Reservation[M]:
    since: datetime = getattr(row, str(processor.claimed_at))
    key = question.model._meta.pk.value_to_string(row)
    contents = [question.using, key, since.isoformat()]
    token = signing.dumps(contents, salt=_salt(processor, bound_to))
    return Reservation(processor, question, row, since, token)


def _salt(processor: Definition[Any], bound_to: str | None) -> str:
    # With the version of a token's contents.
    return json.dumps(["dcl_processor.reservation", 2, processor.name, bound_to])


def _refuse_unmarked(processor: Definition[Any]) -> None:
    if None in (processor.claim, processor.claimed_at, processor.reset):
        raise Unsupported(
            f"{processor.name}: expected a processor with claim=…, claimed_at=… and reset=…, whose "
            f"rows show to whom they were handed out, got {processor.delivery} without one of "
            "them; add it, and with AT_LEAST_ONCE a lease."
        )


class Reservation(Generic[M]):
    """A row that was handed out, and that only this reservation may settle.

    Each method writes only if the row is still this reservation's, and commits; it raises
    ``ReservationLost`` otherwise, and ``InsideTransaction`` inside ``atomic()``. A lease that has
    lapsed does not matter as long as no other worker has taken the row over.

    ``row``: the row, as it was when it was handed out; from a token as it is now, without what
    ``pending`` adds. ``token``: what identifies the reservation in another process; it survives
    ``renew()``.
    """

    def __init__(
        self, processor: Definition[M], question: Question[M], row: M, since: datetime, token: str
    ) -> None:
        self.row, self.token = row, token
        self._processor, self._question, self._since = processor, question, since
        self._pk = row.pk
        #: What recognises the row as long as it is this reservation's.
        self._expected = {str(processor.claimed_at): since, **constants_of(processor.claim or {})}

    @property
    def expires_at(self) -> datetime | None:
        """When the lease lapses, by the database's clock; ``None`` for a claim without one."""
        lease = self._processor.lease
        if lease is None:
            return None
        for end in self._held().values_list(lease.field, flat=True):
            found: datetime = end
            return found
        raise self._lost()

    def settle(self, result: Any = None) -> None:
        """Write what a handler's result would: ``done``, or what an exception records.

        ``result``: what a handler would have returned, or the exception that it would have raised,
        ``Snooze`` and ``Discard`` included.

        Raises the error of a flip that cannot be written, or that leaves the row pending; it is the
        row's failure.
        """
        error = returned_error(result)
        outcome = Handled(result) if error is None else judge(error)
        final = self._end_as(outcome)
        if isinstance(final, Failed) and not isinstance(outcome, Failed):
            raise final.error

    def release(self) -> None:
        """Put the row back as it was before, with its attempt, because nothing was done."""
        self._end_as(None)

    def renew(self) -> None:
        """Renew the lease, which then ends a duration from now; a claim without one stays."""
        refuse_outer_transaction(self._question.using, self._processor.name)
        lease = self._processor.lease
        if lease is None:
            return
        # Race: lost lease that writes. A row that another worker has taken over has another time.
        end = DatabaseNow() + as_timedelta(lease.duration)
        if not self._held().update(**{lease.field: end}):
            raise self._lost()

    def _end_as(self, outcome: Outcome | None) -> Outcome | None:
        final: Outcome | None = Lost()
        if self._held().exists():
            # Race: lost lease that writes. The row is written only if it still has the claim.
            final = settled(self._processor, self._question, self.row, self._expected, outcome)
        if isinstance(final, Lost):
            raise self._lost()
        return final

    def _held(self) -> QuerySet[M, M]:
        return self._question.table.filter(pk=self._pk, **self._expected).order_by()

    def _lost(self) -> ReservationLost:
        return ReservationLost(self._processor.name, self._pk, self._why_lost())

    def _why_lost(self) -> LostBecause:
        rows = self._question.table.filter(pk=self._pk)
        for since in rows.values_list(str(self._processor.claimed_at), flat=True):
            if since not in (None, self._since):
                return "taken_over"
            return "lapsed" if self._question.still_pending([self._pk]).exists() else "settled"
        return "gone"


# --- the run that hands rows out, and settles each of them


class HandingOut(Run):
    """Hands out up to ``limit`` rows, claimed and marked as in any run.

    It has no heartbeat, because the caller renews the lease of a row, and opens no resource.
    ``handed``: the rows, with their batches.
    """

    def __init__(
        self,
        processor: Definition[Any],
        *,
        limit: int = 1,
        filter: Q | None = None,
        using: str | None = None,
    ) -> None:
        super().__init__(processor, filter=filter, using=using, limit=limit, concurrency=1)
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
        mark, pk, attempt = mark_of_claim(processor, question.model), instance.pk, 1
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
