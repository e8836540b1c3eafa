"""The mark that a claim writes to a row that is handled outside the claim's transaction.

A mark is committed before the handler is called. A settlement writes only if the row still has the
mark, because another worker may have taken the row over, or an operator may have settled it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

from django.db.models import F, Value
from django.db.models.functions import Coalesce

from dcl_processor.clock import DatabaseNow, recognisable
from dcl_processor.lease import Lease
from dcl_processor.settlement.writing import resolve
from dcl_processor.statements.cache import names

from .batch import Batch
from .compare_and_set import Guard

Values = Mapping[str, Any]

_NOW = DatabaseNow()


class Mark(Protocol):
    """The interface of the two kinds of marks; columns are named by their ``attname``."""

    #: Whether a row may be put back after its handler was started.
    may_repeat: bool
    #: The values that the claim writes, expressions included, and the name of its statement.
    values: Values
    name: Hashable
    #: Those of the columns that are set to the database's time.
    times: Collection[str]
    #: The values that remove the mark from a settled row.
    removed: Values
    #: The values that put a row back after its handler was called; ``None``: it stays claimed.
    undone: Values | None
    #: Whether it contains a time, which distinguishes it from the mark of any other worker.
    is_unique: bool
    #: The option that has to take a marked row out of pending; ``None``: a lease hides it.
    leaves_by: str | None

    @property
    def rows(self) -> Collection[Any]:
        """The rows that have the mark, or may have it."""
        raise NotImplementedError

    def carried(self, before: Mapping[Any, Values], after: Mapping[Any, Values]) -> None:
        """Record the marked columns of the claimed rows before and after the claim."""

    def forget(self) -> None:
        """Forget the marks, because they were not committed or it is not known."""
        raise NotImplementedError

    def hold(self, since: float) -> None:
        """Hold the marks, which are committed; the claim began at ``since`` (monotonic)."""

    def is_ours(self, pk: Any) -> bool:
        """Return whether the row's handler may still start."""
        raise NotImplementedError

    def let_go(self, pk: Any) -> Guard:
        """Return the guard that recognises the row's mark, for the last write to the row."""
        raise NotImplementedError

    def before(self, pk: Any) -> Values:
        """Return the values that put back a row whose handler was not called."""
        raise NotImplementedError


class ClaimMark:
    """AT_MOST_ONCE: the processor's ``claim``, or without one the flip itself."""

    may_repeat = False

    def __init__(self, batch: Batch[Any]) -> None:
        processor = batch.processor
        self.leaves_by: str | None = "claim" if processor.claim else "done"
        at = processor.claimed_at
        time_of_it: dict[str, Any] = {at: _NOW} if at else {}
        written = {**resolve(processor.claim or processor.done or {}), **time_of_it}
        self.values: Values = _by_attname(batch, written)
        self.name = names(self.values)
        self.times: Collection[str] = time_of_it.keys()
        self.removed: Values = {at: None} if at else {}
        reset = processor.reset
        self.undone: Values | None = None if reset is None else {**self.removed, **reset}
        self.is_unique = at is not None
        self._using = batch.question.using
        self._before: dict[Any, Values] = {}
        self._after: dict[Any, Values] = {}

    @property
    def rows(self) -> Collection[Any]:
        return list(self._after)

    def carried(self, before: Mapping[Any, Values], after: Mapping[Any, Values]) -> None:
        self._before.update(_recognisable(before, self._using))
        self._after.update(_recognisable(after, self._using))

    def forget(self) -> None:
        self._after.clear()

    def hold(self, since: float) -> None:
        """Do nothing, because a claim does not lapse."""

    def is_ours(self, pk: Any) -> bool:  # noqa: ARG002  # as above
        return True

    def let_go(self, pk: Any) -> Guard:
        """Recognise the row by all values that the claim wrote, as they were read back."""
        return {name: [value] for name, value in self._after[pk].items()}

    def before(self, pk: Any) -> Values:
        return self._before[pk]


class LeaseMark:
    """AT_LEAST_ONCE: a lease, and the attempt, counted before a crash can hide it."""

    may_repeat = True
    is_unique = True
    leaves_by: str | None = None

    def __init__(self, batch: Batch[Any]) -> None:
        processor = batch.processor
        assert processor.lease is not None
        assert batch.run.heartbeat is not None
        self._batch = batch
        self._field = processor.lease.field
        self._heartbeat = batch.run.heartbeat
        self._tokens: dict[Any, Any] = {}
        self._guards: dict[Any, Guard] = {}
        self._count = processor.retry.attempts if processor.retry else None
        self.values, self.name = _leased(processor.lease, self._count)
        self.times: Collection[str] = (self._field,)
        self.removed: Values = {self._field: None}
        self.undone: Values | None = {**self.removed, **_uncounted(self._count)}

    @property
    def rows(self) -> Collection[Any]:
        return list(self._tokens)

    def carried(self, before: Mapping[Any, Values], after: Mapping[Any, Values]) -> None:  # noqa: ARG002  # never written back
        using = self._batch.question.using
        self._tokens = {
            pk: recognisable(values[self._field], using) for pk, values in after.items()
        }
        if self._count is not None:
            self._batch.attempts = {pk: values[self._count] for pk, values in after.items()}

    def forget(self) -> None:
        self._tokens.clear()

    def hold(self, since: float) -> None:
        self._heartbeat.hold(self._batch.question, self._tokens, since)

    def is_ours(self, pk: Any) -> bool:
        return self._heartbeat.is_ours(pk)

    def let_go(self, pk: Any) -> Guard:
        """Recognise the row by every lease token that this worker may have written to it."""
        if pk not in self._guards:
            self._guards[pk] = self._heartbeat.let_go(pk, self._tokens[pk])
        return self._guards[pk]

    def before(self, pk: Any) -> Values:  # noqa: ARG002  # relative, the same for all
        return self.undone or {}


# Cached for all batches, because examining the expressions takes as long as examining a row.
@cache
def _leased(lease: Lease, count: str | None) -> tuple[Values, Hashable]:
    counted = {} if count is None else {count: Coalesce(F(count), Value(0)) + 1}
    values = {lease.field: _NOW + timedelta(seconds=lease.seconds), **counted}
    return values, names(values)


@cache
def _uncounted(count: str | None) -> Values:
    return {} if count is None else {count: F(count) - 1}


def _recognisable(said: Mapping[Any, Values], using: str) -> dict[Any, Values]:
    return {
        pk: {name: recognisable(value, using) for name, value in values.items()}
        for pk, values in said.items()
    }


def _by_attname(batch: Batch[Any], values: Values) -> Values:
    meta = batch.question.model._meta
    return {meta.get_field(name).attname: value for name, value in values.items()}
