"""Random histories end as a plain model of them does: I9, and what each delivery promises."""

from __future__ import annotations

import os

import pytest

from dcl_processor import Delivery
from tests.contract.support.machine import Histories, play
from tests.shares import is_whole

pytestmark = pytest.mark.django_db(transaction=True)

#: Make it larger to search for longer than a suite has the time for.
EXAMPLES = int(os.environ.get("HISTORIES", "40" if is_whole() else "15"))
RANDOM = os.environ.get("CI") != "true"


class Leased(Histories):
    delivery = Delivery.AT_LEAST_ONCE


@pytest.mark.parametrize("delivery", list(Delivery), ids=str)
def test_i9_a_random_history_ends_as_its_model_says(delivery: Delivery) -> None:
    play(delivery, max_examples=EXAMPLES, derandomize=not RANDOM)


@pytest.mark.parametrize("delivery", [Delivery.AT_MOST_ONCE, Delivery.AT_LEAST_ONCE], ids=str)
def test_i9_so_does_one_of_asynchronous_handlers(delivery: Delivery) -> None:
    play(delivery, is_async=True, max_examples=max(EXAMPLES // 2, 1), derandomize=not RANDOM)


def test_a_row_whose_attempts_are_used_up_says_how_many_handlers_were_called() -> None:
    """The claim that finds that out has counted one more, for which there was no call."""
    history = Leased()
    history.rows_are_there()
    history.run({0: "fail"}, 1)
    history.time_passes()
    # The second and last attempt is still at work when a copy takes the row over.
    history.run_beside_somebody(0, "late", 1)
    history.the_rows_are_as_in_the_model()
    assert history.model.rows[0].attempts == 2
    assert history.model.rows[0].dead
