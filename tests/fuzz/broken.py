"""Variants of the package that are wrong, each of which the search has to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from dcl_processor import Delivery
from dcl_processor.candidates.question import RowFilter, is_own_table
from dcl_processor.engine.settlement import Statement
from dcl_processor.settlement import flip
from tests import seams
from tests.contract.support.gate import HAS_GATE
from tests.contract.support.messages import SENDS_SEVERAL


def no_second_check(patch: pytest.MonkeyPatch) -> None:
    """Lock the row, and hand it out."""
    seams.replace(patch, seams.NARROWED, lambda self, rows: self.table.filter(rows.condition))


def one_statement(patch: pytest.MonkeyPatch) -> None:
    """Lock and ask in one statement whatever the database lets be locked so."""

    def can_be_locked(queryset: Any) -> bool:
        query = queryset.query
        tables = [alias for alias, count in query.alias_refcount.items() if count]
        refused = query.group_by or query.distinct or query.select_related or query.annotations
        several = len(tables) > 1 or queryset.model._meta.parents
        return is_own_table(queryset) or not (refused or several)

    seams.replace(patch, seams.IS_OWN_TABLE, can_be_locked)


def flip_by_save(patch: pytest.MonkeyPatch) -> None:
    """Write every column that the instance holds, as ``save()`` does."""
    real = flip.flip

    def get_all(processor: Any, row: Any, result: Any) -> Mapping[str, Any]:
        fields = [f for f in row._meta.concrete_fields if not (f.primary_key or f.generated)]
        held = {f.attname: vars(row)[f.attname] for f in fields if f.attname in vars(row)}
        return {**held, **real(processor, row, result)}

    def get_all_of(processor: Any, rows: Any, results: Mapping[Any, Any]) -> dict[Any, Any]:
        return {pk: get_all(processor, rows[pk], result) for pk, result in results.items()}

    seams.replace(patch, seams.FLIP, get_all)
    seams.replace(patch, seams.FLIPS, get_all_of)
    seams.replace(patch, seams.FIXED_FLIP, lambda processor: None)


def forgotten_filter(patch: pytest.MonkeyPatch) -> None:
    """Lose the first of several conditions when the question is narrowed."""

    def narrowed(self: Any, rows: RowFilter) -> Any:
        queryset = self.queryset.all()
        children = queryset.query.where.children
        queryset.query.where.children = children[1:] or children
        return queryset.filter(rows.condition).order_by()

    seams.replace(patch, seams.NARROWED, narrowed)


def one_row_for_all(patch: pytest.MonkeyPatch) -> None:
    """Take it that what the flip does to one row, it does to all."""
    seams.replace(patch, seams.NEEDS_CHECK, lambda context, option: False)


def unmarked_instance(patch: pytest.MonkeyPatch) -> None:
    """Hand the instance out as it was before its claim."""
    seams.replace(patch, seams.SHOW, lambda row, values: None)


def attempts_that_stay(patch: pytest.MonkeyPatch) -> None:
    """Leave the note of earlier failures in a row that succeeded."""
    seams.replace(patch, seams.CLEARED_RETRY, lambda processor, values: values)


def unlocked_settlement(patch: pytest.MonkeyPatch) -> None:
    """Settle a row of two tables as Django does: a SELECT, and an UPDATE for each table."""
    seams.replace(patch, seams.SETTLING, lambda *_: nullcontext())


def lease_that_is_saved(patch: pytest.MonkeyPatch) -> None:
    """Let a ``save()`` write back the lease that its instance has loaded."""
    seams.replace(patch, seams.HAS_ROW, lambda self, instance: False)


def no_key_lock(patch: pytest.MonkeyPatch) -> None:
    """Look at the siblings of a row, and claim it, without the lock of their key."""

    def locking(numbers: list[int], *, one: bool) -> Statement:  # as in the engine
        return Statement("SELECT unnest(%s::bigint[])", [numbers])

    seams.replace(patch, seams.KEY_LOCK, locking)


def unread_answer(patch: pytest.MonkeyPatch) -> None:
    """Take it that a settlement which was sent with the next claim has written its row."""
    seams.replace(patch, seams.IS_WRITTEN, lambda answer: True)


ALL = tuple(Delivery)
OUTSIDE = (Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE)

#: What is wrong, and with which deliveries it can be.
BROKEN: dict[Callable[[pytest.MonkeyPatch], None], Sequence[Delivery]] = {
    no_second_check: ALL,
    flip_by_save: (Delivery.TRANSACTIONAL,),
    forgotten_filter: (Delivery.TRANSACTIONAL,),
    unmarked_instance: OUTSIDE,
    attempts_that_stay: ALL,
    lease_that_is_saved: (Delivery.AT_LEAST_ONCE,),
}
if HAS_GATE:
    # Elsewhere a locking statement reads the newest version of what is joined as well.
    BROKEN[one_statement] = ALL
    # Few questions have such rows, so that it takes long, and no database makes a difference.
    BROKEN[one_row_for_all] = (Delivery.AT_MOST_ONCE,)
    BROKEN[unlocked_settlement] = (Delivery.AT_LEAST_ONCE,)
    # Elsewhere keys are refused, or locked with the whole database.
    BROKEN[no_key_lock] = (Delivery.TRANSACTIONAL,)
if SENDS_SEVERAL:
    BROKEN[unread_answer] = (Delivery.AT_LEAST_ONCE,)

#: Found where handlers do more than succeed, or where a lease comes with an attempt that it counts.
IN_TROUBLE = {attempts_that_stay, unlocked_settlement, lease_that_is_saved, unmarked_instance}

#: Found where a flip waits for the next claim.
OF_STEADY_RUNS = {unread_answer}

#: Found where rows have keys.
OF_KEYS = {no_key_lock}
