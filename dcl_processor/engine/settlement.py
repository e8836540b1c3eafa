"""The values that a delivery makes and the loop passes on.

A settlement is what rows whose handlers have ended still have to send. A delivery returns it, and
the loop sends it. Rows that are handled outside the claim's transaction have a mark, which is
below.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections
from django.db.models import F, Value
from django.db.models.functions import Coalesce

from dcl_processor.candidates.question import these
from dcl_processor.clock import DatabaseNow
from dcl_processor.compiled_sql.cache import signature
from dcl_processor.definition.kinds import Lease
from dcl_processor.definition.model_columns import by_attname
from dcl_processor.execution.handler import Outcome
from dcl_processor.values import Values, resolve

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from dcl_processor.candidates.question import Question, RowFilter
    from dcl_processor.definition.definition import Definition
    from dcl_processor.definition.groups import Key
    from dcl_processor.settlement.writing import Expected
    from dcl_processor.values import Values

    from .marked import BatchCalls
    from .turns import Share


#: Additional rows that a claim may choose among; fewer if each needs the whole question.
SPARE, SPARE_SPANNING = 48, 16

#: Of each statement: the rows that it returned, or how many it wrote if it returns none.
Answer = Any


class Statement(NamedTuple):
    """SQL, and its parameters."""

    sql: str
    params: Sequence[Any] = ()


BEGIN = Statement("BEGIN ISOLATION LEVEL READ COMMITTED")
COMMIT, ROLLBACK = Statement("COMMIT"), Statement("ROLLBACK")


@dataclass(slots=True, eq=False)
class Marked:
    """What the claim wrote to a row that is handled outside its transaction.

    ``before``, ``after``: the marked columns before and after the claim. ``expected``: what
    recognises the row in its last write. ``decided``: its outcome with what is to be written, once
    known, because callables in that are called once. ``may_be_written``: a write of its settlement
    got no answer; ``refused``: why nothing could be written to it.
    By the monotonic clock: ``lease_end``, since it is renewed no more; ``try_until`` and
    ``try_again``, of a settlement that was refused.
    """

    before: Values
    after: Values
    expected: Expected | None = None
    decided: tuple[Outcome | None, Values] | None = None
    may_be_written: bool = False
    refused: Exception | None = None
    is_settled: bool = False
    lease_end: float | None = None
    try_until: float | None = None
    try_again: float = 0.0


@dataclass(slots=True, eq=False)
class Held:
    """A row that this worker holds, by a lock or by a mark.

    ``row``: the user's instance, to which nothing is added; ``attempt``: the number of this one,
    from 1, if a ``retry`` counts it; ``most``: how many attempts the row has; ``None``: no limit.
    ``refused``: its outcome if no handler may be called. ``marked``: what the claim wrote; only of
    a row that is handled outside its transaction, and from the claim on.
    """

    pk: Any
    row: Any
    attempt: int = 1
    most: int | None = None
    refused: Outcome | None = None
    marked: Marked = None  # type: ignore[assignment]  # as above

    @property
    def has_mark(self) -> bool:
        """Whether the claim wrote to the row, or may have done so."""
        marked: Marked | None = self.marked
        return marked is not None


class Wanted:
    """The rows that a claim may take, in this order: the first ``limit`` of them that are free.

    ``limit``: all of them by default. ``choice``: ``None`` if all rows are wanted; otherwise how
    many, and whether they are named in the order of their keys, which the database returns without
    sorting. The order never depends on the row's values, which may have changed since the read.
    ``keys``: those of the rows, if they are in groups; they are locked before.

    Without such a choice a worker would find out row by row, with one statement each, which rows
    other workers have. Queues in a table take their next row from the head in this way (``LIMIT``
    with SKIP LOCKED); here the statement names the rows, and passes once over keys that are no
    longer available.
    """

    __slots__ = ("choice", "keys", "limit", "pks")

    def __init__(
        self,
        pks: Sequence[Any],
        limit: int | None = None,
        *,
        keys: Mapping[Any, Key] = MappingProxyType({}),
    ) -> None:
        self.pks = pks
        self.keys = keys
        self.limit = len(pks) if limit is None else limit
        self.choice = (
            (limit, _are_ascending(pks)) if limit is not None and limit < len(pks) else None
        )

    def first(self, queryset: QuerySet[Any, Any], rows: RowFilter) -> QuerySet[Any, Any]:
        """Limit the queryset to the first ``limit`` rows, if more are named."""
        if self.choice is None:
            return queryset
        limit, by_key = self.choice
        ordered = queryset.order_by("pk" if by_key else rows.order())
        # order_by() does not undo a reverse().
        ordered.query.standard_ordering = True
        return ordered[:limit]

    def visited(self, got: Collection[Any]) -> Sequence[Any]:
        """Return the rows that a claim has visited: those up to the last one that it got."""
        if self.choice is None or len(got) < self.limit:
            return self.pks
        ours = set(got)
        return self.pks[: 1 + max(place for place, pk in enumerate(self.pks) if pk in ours)]


def _are_ascending(pks: Sequence[Any]) -> bool:
    # Only numbers are known to have the same order in the database.
    return {*map(type, pks)} == {int} and [*pks] == sorted(pks)


def spare(question: Question[Any]) -> int:
    """Return how many rows a claim may name in addition to those that it takes.

    0 unless a statement locks only the rows that it returns, however many it passes: InnoDB locks
    all rows that it reads.
    """
    able = connections[question.using].features.has_select_for_no_key_update
    if not able or len(question.model._meta.pk_fields) > 1:
        return 0
    return SPARE if question.own_table else SPARE_SPANNING


class Missed(Enum):
    """Why a claim did not get a row."""

    ABSENT = "another session has locked it, or it is done"
    STALE = "it was locked, and is done, or has another key"
    LOCKED = "another session has its key locked"
    IN_USE = "as many rows of its key as may be are in flight, or in doubt"
    NOT_FIRST = "another row of its key comes first"


@dataclass(slots=True, eq=False)
class Claimed:
    """What a claim got, in the order of the candidates, and why it did not get the others.

    A candidate that is in neither was not visited, and waits again. ``transaction_id``: of the
    transaction that has the locks, where the database has such ids; ``driver``: the
    driver's connection that it is on.
    """

    rows: list[Held]
    missed: Mapping[Any, Missed] = field(default_factory=dict)
    transaction_id: str | None = None
    driver: Any = None


#: Rows with their outcomes; ``None``: no handler was called, and the row waits again.
Ended = list[tuple[Held, Outcome | None]]


@dataclass(slots=True, eq=False)
class Batch:
    """The rows of one delivery, as far as it has come.

    ``wanted``: the candidates; ``window``: of the ``rate``, whose tokens the rows have. The lane
    fills in ``claimed``; ``started``: the rows whose handler was called; ``ended``; and
    ``claimed_at``, by the monotonic clock, if an observer wants to know how long locks are held.
    ``to_blame``: the row that makes the transaction roll back, if it is known. ``counted``: how
    many of the ``ended`` rows are in the report; ``is_counted``: what became of all rows is known.
    ``mark``: what the claim writes to the rows, if they are handled outside its transaction;
    ``is_marked``: it is committed. ``calls``: for its rows. ``unrecorded``: the
    rows whose failures are recorded after its transaction. ``shares``: its candidates by their
    keys, until those of a key have ended.
    """

    question: Question[Any]
    wanted: Wanted
    window: int = 0
    claimed: Claimed | None = None
    started: list[Held] = field(default_factory=list)
    ended: Ended = field(default_factory=list)
    claimed_at: float | None = None
    to_blame: Held | None = None
    counted: int = 0
    is_counted: bool = False
    mark: Mark | None = None
    is_marked: bool = False
    calls: BatchCalls | None = None
    unrecorded: set[Any] = field(default_factory=set)
    shares: list[Share] = field(default_factory=list)

    @property
    def rows(self) -> list[Held]:
        """The claimed rows."""
        return self.claimed.rows if self.claimed is not None else []


@dataclass(slots=True, eq=False)
class Settlement:
    """What is left to send for a batch, and what is true once it is committed.

    ``statements``: of a transaction, its flips, each of which writes its rows or fails, and its
    end; of a row with a mark, what settles it if it still has the mark. ``answers``: set once, by
    the message that was committed.
    """

    batch: Batch
    statements: tuple[Statement, ...]
    answers: Sequence[Answer] | None = None


class NotSettled(Exception):
    """The message that held a settlement failed: it is settled alone, before another claim."""


# --- the mark that a claim writes to a row that is handled outside the claim's transaction
#
# A mark is committed before the handler is called. A settlement writes only if the row still has
# the mark, because another worker may have taken the row over, or an operator may have settled it.


_NOW = DatabaseNow()


@dataclass(frozen=True, slots=True)
class Mark:
    """What a claim writes to its rows; columns are named by their ``attname``.

    ``values``: what is written, expressions included; ``name``: the key of the compiled statement.
    ``time``: the one of these columns that is set from the database's clock, which distinguishes
    the mark from that of any other worker; ``None``: no column does.
    ``removed``: what removes the mark from a settled row; ``reset``: what is written besides to a
    row that was not handled. ``undone``: the values that put back a row after its handler was
    called; ``None``: it stays claimed. ``option``: the option that the mark writes, "claim" or
    "done"; ``None``: it writes none. ``lease``: hides the row, which stays in pending, until it
    lapses; ``None``: the option has to take the row out of pending.
    """

    values: Values
    name: Hashable
    time: str | None
    removed: Values
    undone: Values | None
    option: str | None
    lease: Lease | None = None
    reset: Values = field(default_factory=dict)

    @property
    def is_lease(self) -> bool:
        return self.lease is not None

    def put_back(self, before: Values) -> Values:
        """Return the values that put back a row whose handler was not called.

        ``before``: what its columns contained before the claim. Under a lease its mark is not
        written: it may be that of a dead worker whose row this worker has taken over.
        """
        if self.lease is None:
            return before
        back = {**(self.undone or {})}
        if before.get(self.lease.field) is not None:
            # The worker before did not settle the row, perhaps in its last attempt.
            back[self.lease.field] = self.lease.taken_away
        return back


def show(row: Any, values: Values) -> None:
    """Let the instance have the row's values, so that the handler's ``save()`` keeps them.

    Past its attributes, which may refuse an assignment, or count it as a change. Fields that the
    user's queryset deferred stay deferred.
    """
    known = vars(row)
    for name, value in values.items():
        if name in known:
            known[name] = value


def column(question: Question[Any], rows: Sequence[Held], name: str) -> dict[Any, Any]:
    """Return a column's values by the rows' keys, as they were read under the lock."""
    known = {held.pk: vars(held.row) for held in rows}
    is_deferred = any(name not in values for values in known.values())
    if is_deferred:
        return dict(question.table.filter(these(known)).values_list("pk", name))
    return {pk: values[name] for pk, values in known.items()}


def mark_of(processor: Definition[Any], model: Any, *, is_held: bool = False) -> Mark:
    """Return the mark of a processor's claims.

    AT_MOST_ONCE: the ``claim``, or without one the flip itself. AT_LEAST_ONCE: a lease, and the
    attempt, counted before a crash can hide it; with a ``claim`` the lease and the claim are one
    mark, which one statement writes and removes. ``is_held``: the row was claimed earlier, so that
    nothing is written again, and no callable of ``claim`` is called.
    """
    lease, at, claim = processor.lease, processor.claimed_at, processor.claim
    time, none = ({at: _NOW}, {at: None}) if at else ({}, {})
    chosen: Values = claim or ({} if lease is not None else processor.done or {})
    values = by_attname(model, {**({} if is_held else resolve(chosen)), **time})
    if lease is None:
        undone = None if processor.reset is None else {**none, **processor.reset}
        return Mark(values, signature(values), at, none, undone, "claim" if claim else "done")
    reset = by_attname(model, (claim and processor.reset) or {})
    removed = {**none, lease.field: None}
    undone = {**reset, **removed}
    values[lease.field] = _NOW + timedelta(seconds=lease.seconds)
    if processor.retry is not None:
        count = processor.retry.attempts
        values[count] = Coalesce(F(count), Value(0)) + 1
        undone[count] = F(count) - 1
    option = "claim" if claim else None
    return Mark(values, signature(values), lease.field, removed, undone, option, lease, reset)
