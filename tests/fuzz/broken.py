"""Variants of the package that are wrong, each of which the search has to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dcl_processor import Delivery
from dcl_processor.engine.settlement import Statement
from dcl_processor.settlement import outcome_values
from tests import seams
from tests.contract.support.gate import HAS_GATE
from tests.contract.support.messages import SENDS_SEVERAL


def no_second_check(patch: pytest.MonkeyPatch) -> None:
    """Lock the row, and hand it out."""
    seams.replace(patch, seams.NARROWED, lambda self, rows: self.table.filter(rows.condition))


def flip_by_save(patch: pytest.MonkeyPatch) -> None:
    """Write every column that the instance holds, as ``save()`` does."""
    real = outcome_values.flip

    def get_all(processor: Any, row: Any, result: Any) -> Mapping[str, Any]:
        fields = [f for f in row._meta.concrete_fields if not (f.primary_key or f.generated)]
        held = {f.attname: vars(row)[f.attname] for f in fields if f.attname in vars(row)}
        return {**held, **real(processor, row, result)}

    seams.replace(patch, seams.FLIP, get_all)
    seams.replace(patch, seams.FIXED_FLIP, lambda processor: None)


def attempts_that_stay(patch: pytest.MonkeyPatch) -> None:
    """Leave the note of earlier failures in a row that succeeded."""
    seams.replace(patch, seams.CLEARED_RETRY, lambda processor, values: values)


def no_key_lock(patch: pytest.MonkeyPatch) -> None:
    """Look at the siblings of a row, and claim it, without the lock of their key."""

    def locking(numbers: list[int], *, one: bool) -> Statement:  # as in the engine
        return Statement("SELECT unnest(%s::bigint[])", [numbers])

    seams.replace(patch, seams.KEY_LOCK, locking)


def unread_answer(patch: pytest.MonkeyPatch) -> None:
    """Take it that a settlement which was sent with the next claim has written its row."""
    seams.replace(patch, seams.IS_WRITTEN, lambda answer: True)


#: What is wrong, and with which deliveries it can be.
BROKEN: dict[Callable[[pytest.MonkeyPatch], None], Sequence[Delivery]] = {
    no_second_check: tuple(Delivery),
    flip_by_save: (Delivery.TRANSACTIONAL,),
    attempts_that_stay: (Delivery.AT_LEAST_ONCE,),
}
if HAS_GATE:
    # Elsewhere keys are refused, or locked with the whole database.
    BROKEN[no_key_lock] = (Delivery.TRANSACTIONAL,)
if SENDS_SEVERAL:
    BROKEN[unread_answer] = (Delivery.AT_LEAST_ONCE,)
