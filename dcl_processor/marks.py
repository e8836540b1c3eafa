"""What a claim leaves on a row that is handled outside the claim's transaction.

A mark is committed before the handler is called. Whoever settles the row later writes only if the
row still carries the mark: somebody else may have taken it over, or cleared it up.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from django.db.models import F, Q, QuerySet

from . import clock
from .batch import Batch
from .pending import these

Values = Mapping[str, Any]


class Mark(Protocol):
    """What the two kinds of marks have in common."""

    #: Whether the handler's row may be put back after it was started.
    may_repeat: bool
    #: What takes the mark off a row that was settled.
    removed: Values
    #: What puts a row back as it was before the claim; ``None``: it cannot be put back.
    undone: Values | None

    def write(self) -> None: ...
    def is_ours(self, pk: Any) -> bool: ...
    def let_go(self, pk: Any) -> Q: ...


class ClaimMark:
    """AT_MOST_ONCE: the processor's ``claim``, or without one the flip itself."""

    may_repeat = False

    def __init__(self, batch: Batch[Any]) -> None:
        processor = batch.processor
        self._batch = batch
        self._values = dict(processor.claim or processor.done or {})
        self._claimed_at = processor.claimed_at
        self.removed: Values = {self._claimed_at: None} if self._claimed_at else {}
        reset = processor.reset
        self.undone: Values | None = None if reset is None else {**self.removed, **reset}

    def write(self) -> None:
        if not self._batch.rows:
            return
        if self._claimed_at is not None:
            self._values[self._claimed_at] = clock.read(self._batch.question, self._batch.rows)
        _write(self._batch, self._values)

    def is_ours(self, pk: Any) -> bool:  # noqa: ARG002  # no time takes a claim away
        return True

    def let_go(self, pk: Any) -> Q:  # noqa: ARG002  # all rows of a batch are marked alike
        """Recognise the row by what the claim wrote, as far as that is a constant."""
        constants = {
            name: value
            for name, value in self._values.items()
            if not hasattr(value, "resolve_expression") and not callable(value)
        }
        return Q(**constants)


class LeaseMark:
    """AT_LEAST_ONCE: a lease, and the attempt, counted before a crash can hide it."""

    may_repeat = True

    def __init__(self, batch: Batch[Any]) -> None:
        processor = batch.processor
        assert processor.lease is not None
        assert batch.run.keeper is not None
        self._batch = batch
        self._lease = processor.lease
        self._keeper = batch.run.keeper
        self._counted = {processor.retry.attempts: 1} if processor.retry else {}
        self.removed: Values = {self._lease.field: None}
        self.undone: Values | None = {
            **self.removed,
            **{name: F(name) - one for name, one in self._counted.items()},
        }

    def write(self) -> None:
        if not self._batch.rows:
            return
        now = clock.read(self._batch.question, self._batch.rows)
        token = now + timedelta(seconds=self._lease.seconds)
        counted = {name: F(name) + one for name, one in self._counted.items()}
        _write(self._batch, {self._lease.field: token, **counted})
        self._keeper.hold(self._batch.question, list(self._batch.rows), token)

    def is_ours(self, pk: Any) -> bool:
        return self._keeper.is_ours(pk)

    def let_go(self, pk: Any) -> Q:
        """Recognise the row by every value that its lease may have had from us."""
        return self._keeper.let_go(pk)


def _write(batch: Batch[Any], values: Values) -> None:
    """Mark the rows, in the transaction that holds their locks, and the instances too."""
    table: QuerySet[Any] = QuerySet(batch.question.model, using=batch.question.using)
    resolved = {name: value() if callable(value) else value for name, value in values.items()}
    table.filter(these(batch.rows)).update(**resolved)
    for row in batch.rows.values():
        for name, value in resolved.items():
            if not hasattr(value, "resolve_expression"):
                setattr(row, name, value)
