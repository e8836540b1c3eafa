"""The values that a run passes on: a row, a batch of rows, and the mark that a claim writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models import F, Model, Value
from django.db.models.functions import Coalesce

from dcl_processor.core.options.kinds import Lease
from dcl_processor.core.options.options import Definition
from dcl_processor.core.pending.clock import DatabaseNow
from dcl_processor.core.pending.question import Question
from dcl_processor.core.report.outcomes import Outcome
from dcl_processor.core.report.values import Values, constants_of, resolve
from dcl_processor.core.sql.session import Wanted


@dataclass(slots=True, eq=False)
class Row:
    """A row that this worker holds, by a lock or by a mark.

    ``instance``: the user's, to which nothing is added; ``attempt``: the number of this one, from
    1, if a ``retry`` counts it; ``most``: how many attempts the row has; ``None``: no limit.
    ``refused``: its outcome if no handler may be called. ``before``: the marked columns before the
    claim; ``expected``: what recognises the row in its settlement.
    """

    pk: Any
    instance: Any
    attempt: int = 1
    most: int | None = None
    refused: Outcome | None = None
    before: Values = field(default_factory=dict)
    expected: Values = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of one delivery, as far as it has come.

    ``rows``: those that were claimed; ``started``: those whose handler was called; ``ended``: rows
    with their outcomes; ``None``: no handler was called, and the row waits again. ``is_alone``: its
    row was in another batch, which failed. ``mark``: what the claim writes, if that is committed
    before the work. ``to_blame``: the row whose handler ended the transaction.
    ``is_committing``: a COMMIT may have been sent;
    ``is_kept``: it is sent with the next claim.
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
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """What a claim writes to its rows; columns are named by their ``attname``.

    ``values``: what is written, expressions included. ``time``: the one of these columns that is
    set from the database's clock, which distinguishes the mark from that of any other worker.
    ``removed``: what removes the mark from a settled row; ``reset``: what is written besides to a
    row that was not handled. ``undone``: the values that put back a row after its handler was
    called; ``None``: it stays claimed. ``is_flip``: the mark is the flip itself.
    """

    values: Values
    time: str | None
    removed: Values
    undone: Values | None
    reset: Values
    is_flip: bool = False
    lease: Lease | None = None

    def recognised(self, after: Values) -> Values:
        """Return what recognises a row with this mark; ``after``: its columns, as read back."""
        if self.time is not None and self.lease is not None:
            return {self.time: [after[self.time]]}
        return {**after, **constants_of(self.values)}

    def put_back(self, before: Values) -> Values:
        """Return the values that put back a row whose handler was not called."""
        if self.lease is None:
            return before
        back = {**(self.undone or {})}
        if before.get(self.lease.field) is not None:
            # The worker before did not settle the row, and nothing was found out about that.
            back[self.lease.field] = self.lease.taken_away
        return back


def by_attname(model: type[Model], values: Values) -> dict[str, Any]:
    """Return the values by the ``attname`` of their columns: a foreign key has two names."""
    meta: Any = model._meta
    return {meta.get_field(name).attname: value for name, value in values.items()}


class Marks:
    """Makes the mark of each claim of a run.

    The expressions in it are the same objects for all claims, so that one statement serves them.
    """

    def __init__(self, processor: Definition[Any]) -> None:
        self._processor = processor
        self._now: Any = DatabaseNow()
        lease = processor.lease
        self._end: Any = None if lease is None else self._now + timedelta(seconds=lease.seconds)
        count = processor.retry.attempts if processor.retry is not None else None
        self._count = count
        self._next: Any = count and Coalesce(F(count), Value(0)) + 1
        self._last: Any = count and F(count) - 1

    def make(self, model: type[Model]) -> Mark:
        processor = self._processor
        lease, at, claim = processor.lease, processor.claimed_at, processor.claim
        time, none = ({at: self._now}, {at: None}) if at else ({}, {})
        is_flip = lease is None and claim is None
        chosen: Values = claim or (processor.done or {} if is_flip else {})
        values = by_attname(model, {**resolve(chosen), **time})
        if lease is None:
            undone = None if processor.reset is None else {**none, **processor.reset}
            return Mark(values, at, none, undone, {}, is_flip)
        reset = by_attname(model, (claim and processor.reset) or {})
        removed = {**none, lease.field: None}
        undone = {**reset, **removed}
        values[lease.field] = self._end
        if self._count:
            values[self._count] = self._next
            undone[self._count] = self._last
        return Mark(values, lease.field, removed, undone, reset, is_flip, lease)


def column(question: Question[Any], rows: Sequence[Row], name: str) -> dict[Any, Any]:
    """Return a column's values by the rows' keys, as they were read under the lock."""
    known = {row.pk: vars(row.instance) for row in rows}
    if any(name not in values for values in known.values()):
        return dict(question.table.filter(pk__in=[*known]).values_list("pk", name))
    return {pk: values[name] for pk, values in known.items()}
