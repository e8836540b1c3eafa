"""Variants of the core that are wrong, each in one way that has been shipped.

The explorer is worth something only if it finds each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from django.db.models import Q, QuerySet

from dcl_processor.candidates.question import Question
from dcl_processor.definition.kinds import Delivery
from dcl_processor.engine.deliveries import DELIVERIES
from dcl_processor.engine.heartbeat import Heartbeat
from dcl_processor.engine.lane import Lane
from dcl_processor.engine.settlement import COMMIT, Batch, Settlement, Statement
from dcl_processor.engine.work import handle_locked
from tests import seams


@contextmanager
def _patched(*changes: tuple[seams.Seam, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for seam, value in changes:
            seams.replace(patch, seam, value)
        yield


def no_second_check() -> Any:
    """Lock the row, and hand it out without asking again."""
    return _patched((seams.NARROWED, lambda self, rows: self.table.filter(rows.condition)))


def check_in_the_lock_statement() -> Any:
    """Take a spanning question for one that the lock statement may ask."""
    return _patched((seams.IS_OWN_TABLE, lambda queryset: True))


def flip_outside_the_transaction() -> Any:
    """Commit the work, and flip the row afterwards."""

    def transactional(lane: Lane, batch: Batch, after: Settlement | None) -> Settlement:
        lane.claim(batch, after)
        handle_locked(lane, batch)
        lane.session.settle(Settlement(batch, (COMMIT,)))
        rows: QuerySet[Any] = QuerySet(batch.question.model, using=batch.question.using)
        for held in batch.rows:
            rows.filter(pk=held.pk).update(**lane.processor.done or {})
        return Settlement(batch, (), answers=())

    changed = {**DELIVERIES, Delivery.TRANSACTIONAL: transactional}
    return _patched((seams.DELIVERIES, changed))


def lock_without_skip() -> Any:
    """Wait for the session that has the lock."""
    return _patched((seams.LOCK_CLAUSE, lambda *_: "FOR NO KEY UPDATE"))


def settle_without_comparing() -> Any:
    """Settle a row by its key, even if another worker has its lease by now."""

    def write(question: Question[Any], pk: Any, expected: Any, values: Mapping[str, Any]) -> int:
        rows: QuerySet[Any] = QuerySet(question.model, using=question.using)
        return rows.filter(Q(pk=pk)).update(**values)

    return _patched((seams.WRITE, write), (seams.STATEMENT, lambda *_: None))


def heartbeat_during_settle() -> Any:
    """Settle by the newest value of the lease alone, and go on renewing it meanwhile."""

    def let_go(self: Heartbeat, pk: Any, claimed: Any) -> Any:
        field = self._lease.field
        with self._lock:
            return {field: self._tokens.get(pk, [claimed[field]])[-1:]}

    return _patched((seams.LET_GO, let_go))


def any_transaction() -> Any:
    """Flip in whatever transaction is open by then."""
    return _patched((seams.TRANSACTION_ID, lambda *_: False))


def no_key_lock() -> Any:
    """Look at the siblings of a row, and claim it, without the lock of their key."""

    def locking(numbers: list[int], *, one: bool) -> Statement:  # as in the engine
        return Statement("SELECT number FROM unnest(%s::bigint[]) AS numbers (number)", [numbers])

    return _patched((seams.KEY_LOCK, locking))


def lapsed_leases_are_left() -> Any:
    """Take it that a lease which has lapsed will not be renewed."""
    return _patched((seams.REAP, lambda question, key, pks: 0))


def no_head() -> Any:
    """Claim in order what was first when the candidates were read."""
    return _patched((seams.IS_FIRST, lambda pk, look: True))
