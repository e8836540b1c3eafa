"""Generated questions and flips: each is refused by name, or two workers get it right."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from django.db import connection
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from dcl_processor import Delivery
from tests.fuzz.cases import Case, cases
from tests.fuzz.verdict import ACCEPTED, REFUSED, judge
from tests.shares import is_whole

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: Make it larger to search for longer than a suite has the time for, with another seed each time.
FUZZ = int(os.environ.get("FUZZ", "0"))
EXAMPLES = FUZZ or (50 if is_whole() else 25)


@pytest.mark.timeout(max(600, 5 * FUZZ))
@pytest.mark.parametrize("delivery", Delivery)
def test_a_generated_pair_is_refused_by_name_or_goes_right(
    delivery: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    """I1 to I6 and I11."""
    caplog.set_level("CRITICAL", "dcl_processor")  # a failed row says so, and many do
    came_to: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=not FUZZ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(case=cases(delivery))
    def each(case: Case) -> None:
        note(f"pending: {case.question}")
        note(f"done: {case.flip}")
        note(f"claim: {case.claim}")
        came_to[judge(case)] += 1

    if FUZZ and (given_seed := os.environ.get("FUZZ_SEED")):
        each = seed(int(given_seed))(each)
    each()
    print(f"\n{connection.vendor}, {delivery}: {came_to.total()} pairs: {dict(came_to)}")
    # Of few pairs, most may come to the same.
    assert came_to[ACCEPTED] > EXAMPLES / 5 if FUZZ else came_to[ACCEPTED]
    assert came_to[REFUSED] or not FUZZ
