"""The values that a run passes on: a row, a batch of rows, and the mark that a claim writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

from django.db.models import F, Model, Value
from django.db.models.functions import Coalesce

from dcl_processor.options.kinds import Lease
from dcl_processor.options.model_columns import by_attname
from dcl_processor.options.options import Definition
from dcl_processor.pending.clock import DatabaseNow
from dcl_processor.pending.question import Question
from dcl_processor.report.outcomes import Handled, Outcome
from dcl_processor.report.values import Values, constants_of, resolve
from dcl_processor.sql.steps import Wanted


@dataclass(slots=True, eq=False)
class Row:
    """A row that this worker holds, by a lock or by a mark.

    ``instance``: the user's, to which nothing is added; ``attempt``: the number of this one, from
    1, if a ``retry`` counts it. ``refused``: its outcome if no handler may be called. ``before``:
    the marked columns before the claim; ``expected``: what recognises the row in its settlement.
    ``flip``: what is written to it, once it was handled in its transaction.
    """

    pk: Any
    instance: Any
    attempt: int = 1
    refused: Outcome | None = None
    before: Values = field(default_factory=dict)
    expected: Values = field(default_factory=dict)
    flip: Values = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of one delivery, as far as it has come.

    ``rows``: those that were claimed; ``started``: those whose handler was called; ``ended``: rows
    with their outcomes; ``None``: no handler was called, and the row waits again. ``is_alone``: its
    row was in another batch, which failed. ``mark``: what the claim writes, if that is committed
    before the work. ``to_blame``: the row whose handler ended the transaction.
    ``is_committing``: a COMMIT may have been sent.
    """

    question: Question[Any]
    wanted: Wanted
    is_alone: bool = False
    rows: list[Row] = field(default_factory=list)
    started: list[Row] = field(default_factory=list)
    ended: list[tuple[Row, Outcome | None]] = field(default_factory=list)
    mark: Mark | None = None
    to_blame: Row | None = None
    is_committing: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What a claim writes to its rows; columns are named by their ``attname``.

    ``values``: what is written, expressions included. ``removed``: what removes the mark from a
    settled row; ``reset``: what is written besides to a row that was not handled. ``undone``: the
    values that put back a row after its handler was called; ``None``: it stays claimed.
    ``is_flip``: the mark is the flip itself.
    """

    values: Values
    removed: Values
    undone: Values | None
    reset: Values
    is_flip: bool = False
    lease: Lease | None = None

    def recognised(self, after: Values) -> Values:
        """Return what recognises a row with this mark; ``after``: its columns, as read back."""
        if self.lease is not None:
            return {self.lease.field: [after[self.lease.field]]}
        return {**after, **constants_of(self.values)}


@dataclass(slots=True, eq=False)
class Unsettled:
    """A row whose outcome is known and not written.

    ``outcome``: ``None``: no handler was called, and the row is put back. ``since``: when it was
    decided. ``error``: why it was not written at the last try; ``was_sent``: it may have been.
    """

    batch: Batch
    row: Row
    outcome: Outcome | None
    values: Values
    since: float
    again_at: float = 0.0
    pause: float = 0.02
    error: Exception | None = None
    was_sent: bool = False

    @property
    def asks(self) -> bool:
        """Whether the row has to leave ``pending`` by what is written."""
        return type(self.outcome) is Handled


# The expressions of a mark are the same objects for all claims, so that one statement serves them.

_NOW: Any = DatabaseNow()


@cache
def _end_of(lease: Lease) -> Any:
    return _NOW + timedelta(seconds=lease.seconds)


@cache
def _one_more(column: str) -> Any:
    return Coalesce(F(column), Value(0)) + 1


def mark_of_claim(processor: Definition[Any], model: type[Model]) -> Mark:
    """Return what the next claim writes to its rows."""
    lease, at, claim = processor.lease, processor.claimed_at, processor.claim
    time, none = ({at: _NOW}, {at: None}) if at else ({}, {})
    is_flip = lease is None and claim is None
    chosen: Values = claim or (processor.done or {} if is_flip else {})
    values = by_attname(model, {**resolve(chosen), **time})
    if lease is None:
        undone = None if processor.reset is None else {**none, **processor.reset}
        return Mark(values, none, undone, {}, is_flip)
    reset = by_attname(model, (claim and processor.reset) or {})
    removed = {**none, lease.field: None}
    values[lease.field] = _end_of(lease)
    if processor.retry is not None:
        values[processor.retry.attempts] = _one_more(processor.retry.attempts)
    return Mark(values, removed, {**reset, **removed}, reset, is_flip, lease)
