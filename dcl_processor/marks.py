"""What a claim leaves on a row that is handled outside the claim's transaction.

A mark is committed before the handler is called. Whoever settles the row later writes only if the
row still carries the mark: somebody else may have taken it over, or cleared it up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from django.db.models import F, Q, QuerySet, Value
from django.db.models.functions import Coalesce

from . import one_statement
from .batch import Batch
from .clock import DatabaseNow
from .isolation import row_transaction
from .locking import claim
from .pending import these
from .settlement import resolve

Values = Mapping[str, Any]


class Mark(Protocol):
    """What the two kinds of marks have in common; columns go by their ``attname``."""

    #: Whether the handler's row may be put back after it was started.
    may_repeat: bool
    #: What the claim writes, expressions included.
    values: Values
    #: What takes the mark off a row that was settled.
    removed: Values
    #: What puts a row back after its handler was called; ``None``: it cannot be put back.
    undone: Values | None

    def carried(self, before: Mapping[Any, Values], after: Mapping[Any, Values]) -> None:
        """Be told what the claimed rows said before, and say now."""

    def hold(self, since: float) -> None:
        """Be told that the marks are committed; the claim began at ``since`` (monotonic)."""

    def is_ours(self, pk: Any) -> bool:
        """Tell whether the row's handler may still start."""
        raise NotImplementedError

    def let_go(self, pk: Any) -> Q:
        """Return what recognises the row as ours, for the last write to it."""
        raise NotImplementedError

    def before(self, pk: Any) -> Values:
        """Return what puts back a row whose handler was not called."""
        raise NotImplementedError


class ClaimMark:
    """AT_MOST_ONCE: the processor's ``claim``, or without one the flip itself."""

    may_repeat = False

    def __init__(self, batch: Batch[Any]) -> None:
        processor = batch.processor
        at = processor.claimed_at
        time_of_it: dict[str, Any] = {at: DatabaseNow()} if at else {}
        written = {**resolve(processor.claim or processor.done or {}), **time_of_it}
        self.values: Values = _by_attname(batch, written)
        self.removed: Values = {at: None} if at else {}
        reset = processor.reset
        self.undone: Values | None = None if reset is None else {**self.removed, **reset}
        self._before: dict[Any, Values] = {}
        self._after: dict[Any, Values] = {}

    def carried(self, before: Mapping[Any, Values], after: Mapping[Any, Values]) -> None:
        self._before.update(before)
        self._after.update(after)

    def hold(self, since: float) -> None:
        """Do nothing: no time takes a claim away."""

    def is_ours(self, pk: Any) -> bool:  # noqa: ARG002  # as above
        return True

    def let_go(self, pk: Any) -> Q:
        """Recognise the row by everything that the claim wrote, as the column gave it back."""
        return Q(**self._after[pk])

    def before(self, pk: Any) -> Values:
        return self._before[pk]


class LeaseMark:
    """AT_LEAST_ONCE: a lease, and the attempt, counted before a crash can hide it."""

    may_repeat = True

    def __init__(self, batch: Batch[Any]) -> None:
        processor = batch.processor
        assert processor.lease is not None
        assert batch.run.keeper is not None
        self._batch = batch
        self._field = processor.lease.field
        self._keeper = batch.run.keeper
        self._tokens: dict[Any, Any] = {}
        self._count = processor.retry.attempts if processor.retry else None
        counted, uncounted = {}, {}
        if self._count is not None:
            counted[self._count] = Coalesce(F(self._count), Value(0)) + 1
            uncounted[self._count] = F(self._count) - 1
        until = DatabaseNow() + timedelta(seconds=processor.lease.seconds)
        self.values: Values = {self._field: until, **counted}
        self.removed: Values = {self._field: None}
        self.undone: Values | None = {**self.removed, **uncounted}

    def carried(self, before: Mapping[Any, Values], after: Mapping[Any, Values]) -> None:  # noqa: ARG002  # never written back
        self._tokens = {pk: values[self._field] for pk, values in after.items()}
        if self._count is not None:
            self._batch.attempts = {pk: values[self._count] for pk, values in after.items()}

    def hold(self, since: float) -> None:
        self._keeper.hold(self._batch.question, self._tokens, since)

    def is_ours(self, pk: Any) -> bool:
        return self._keeper.is_ours(pk)

    def let_go(self, pk: Any) -> Q:
        """Recognise the row by every value that its lease may have had from us."""
        return self._keeper.let_go(pk)

    def before(self, pk: Any) -> Values:  # noqa: ARG002  # relative, the same for all
        return self.undone or {}


def claim_and_mark(batch: Batch[Any], mark: Mark) -> None:
    """Lock and ask again, mark the rows that are ours, commit."""
    began = time.monotonic()
    question = batch.question
    # The first rows of a run are rehearsed with, which takes a transaction.
    if batch.run.rehearsed and one_statement.suits(question):
        one_statement.claim_and_mark(batch, mark)
    else:
        with row_transaction(question.using):
            batch.claimed(claim(question, batch.pks))
            batch.run.rehearse(question, batch.rows)
            _write(batch, mark)
    mark.hold(began)


def _write(batch: Batch[Any], mark: Mark) -> None:
    """Mark the rows, in the transaction that holds their locks, and the instances too."""
    if not batch.rows:
        return
    question, names = batch.question, list(mark.values)
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    marked = table.filter(these(batch.rows))
    before = _read(marked, names)
    marked.update(**mark.values)
    # Read back: the time is the database's, and a column may keep a value in its own way.
    after = _read(marked, names)
    mark.carried(before, after)
    for pk, row in batch.rows.items():
        show(row, after[pk])


def _read(rows: QuerySet[Any], names: list[str]) -> dict[Any, Values]:
    found = rows.values_list("pk", *names)
    return {pk: dict(zip(names, values, strict=True)) for pk, *values in found}


def show(row: Any, values: Values) -> None:
    """Let the instance say what its row says, so that a ``save()`` by the handler changes nothing.

    What the user's queryset left out stays out.
    """
    deferred = row.get_deferred_fields()
    for name, value in values.items():
        if name not in deferred:
            setattr(row, name, value)


def _by_attname(batch: Batch[Any], values: Values) -> Values:
    meta = batch.question.model._meta
    return {meta.get_field(name).attname: value for name, value in values.items()}
