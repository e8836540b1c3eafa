"""The values that a delivery makes and the loop passes on.

A settlement is what rows whose handlers have ended still have to send. A delivery returns it, and
the loop sends it with the claim of the next rows, in one message. No code of the user runs between
the two. A settlement that must not wait is sent alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections

from dcl_processor.execution.handler import Outcome

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from dcl_processor.candidates.question import Question, RowFilter
    from dcl_processor.definition.groups import Key
    from dcl_processor.settlement.writing import Expected
    from dcl_processor.values import Values

    from .marked import BatchCalls
    from .marks import Mark
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
    ``sent_before``: what the driver had sent before the first handler.
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
    sent_before: int = -1
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
