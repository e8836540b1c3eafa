"""The random histories notice when the core is wrong: each error here makes them fail.

The errors are few and small, as those are that a person makes. The histories are the same in every
run, and not made shorter when they fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db.models import F, Q
from hypothesis import Phase

from dcl_processor import Delivery
from dcl_processor.compiled_sql.cache import signature
from dcl_processor.engine import marks
from dcl_processor.engine.lane import Lane
from dcl_processor.engine.marks import Mark
from tests import seams
from tests.contract.support.machine import play

pytestmark = pytest.mark.django_db(transaction=True)

TRANSACTIONAL, AT_MOST_ONCE, AT_LEAST_ONCE = Delivery
Patch = pytest.MonkeyPatch


def settle_whatever_the_row_says(patch: Patch) -> None:
    seams.replace(patch, seams.EXPECTED, lambda *_: {})


def count_no_attempt_at_the_claim(patch: Patch) -> None:
    def lease_mark(lane: Lane) -> Mark:
        mark = marks.lease_mark(lane)
        values = {**mark.values, "attempts": F("attempts")}
        return replace(mark, values=values, name=signature(values))

    seams.replace(patch, seams.LEASE_MARK, lease_mark)


def keep_the_attempts_of_a_requeued_row(patch: Patch) -> None:
    seams.replace(patch, seams.UNTRIED_VALUES, lambda self: {})


def ask_under_the_lock_for_pending_alone(patch: Patch) -> None:
    def narrowed(self: Any, those: Any) -> Any:
        return self.unfiltered.filter(those.condition).order_by()

    seams.replace(patch, seams.NARROWED, narrowed)


def take_over_a_lease_that_lives(patch: Patch) -> None:
    seams.replace(patch, seams.LEASE_FREE, lambda self: Q(pk__isnull=False))


def leave_behind_what_was_interrupted(patch: Patch) -> None:
    seams.replace(patch, seams.CLEAR_UP, lambda *_: None)


def keep_the_work_of_a_failed_row(patch: Patch) -> None:
    seams.replace(patch, seams.UNDO, lambda self: None)


def forget_the_dead_letter(patch: Patch) -> None:
    seams.replace(patch, seams.GET_FAILED, lambda self, row, error: {})


ERRORS: list[tuple[Callable[[Patch], None], Delivery]] = [
    (settle_whatever_the_row_says, AT_MOST_ONCE),
    (count_no_attempt_at_the_claim, AT_LEAST_ONCE),
    (keep_the_attempts_of_a_requeued_row, TRANSACTIONAL),
    (ask_under_the_lock_for_pending_alone, TRANSACTIONAL),
    (take_over_a_lease_that_lives, AT_LEAST_ONCE),
    (leave_behind_what_was_interrupted, AT_MOST_ONCE),
    (keep_the_work_of_a_failed_row, TRANSACTIONAL),
    (forget_the_dead_letter, AT_LEAST_ONCE),
]


@pytest.mark.parametrize(
    ("error", "delivery"), ERRORS, ids=[f"{e.__name__}-{d}" for e, d in ERRORS]
)
def test_a_wrong_core_does_not_get_past_the_histories(
    error: Callable[[Patch], None], delivery: Delivery, monkeypatch: Patch
) -> None:
    error(monkeypatch)
    with pytest.raises(AssertionError):
        play(delivery, max_examples=100, derandomize=True, phases=(Phase.generate,))
