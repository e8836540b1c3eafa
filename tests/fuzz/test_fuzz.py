"""Generated questions and flips: each is refused by name, or two copies get it right."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from django.db import connection
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from dcl_processor import Delivery
from tests.fuzz.cases import STRANGER, Case, cases
from tests.fuzz.verdict import ACCEPTED, REFUSED, TROUBLED, judge, narrow_windows

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: Make it larger to search for longer than a suite has the time for, with another seed each time.
FUZZ = int(os.environ.get("FUZZ", "0"))
EXAMPLES = FUZZ or 25

#: Of what was accepted, that which two copies met at.
RACED = "raced"


def search(
    examples_of: st.SearchStrategy[Case], examples: int, *, derandomize: bool, shrink: bool = True
) -> Counter[str]:
    """Judge so many examples; return how many came to what."""
    came_to: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(case=examples_of)
    def each(case: Case) -> None:
        note(f"pending: {case.question}")
        note(f"done: {case.flip}")
        note(f"claim: {case.claim}, failed: {case.failed}, reset: {case.reset}")
        came = judge(case)
        came_to[came] += 1
        handled = came in {ACCEPTED, TROUBLED}
        came_to[RACED] += handled and case.meeting != STRANGER

    if not derandomize and (given_seed := os.environ.get("FUZZ_SEED")):
        each = seed(int(given_seed))(each)
    each()
    return came_to


@pytest.mark.timeout(max(300, 5 * FUZZ))
@pytest.mark.parametrize("delivery", Delivery)
def test_a_generated_pair_is_refused_by_name_or_goes_right(
    delivery: Delivery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I1 to I6 and I11."""
    caplog.set_level("CRITICAL", "dcl_processor")  # a failed row says so, and many do
    narrow_windows(monkeypatch)
    came_to = search(cases(delivery), EXAMPLES, derandomize=not FUZZ)
    pairs = sum(came_to.values()) - came_to[RACED]
    print(f"\n{connection.vendor}, {delivery}: {pairs} pairs: {dict(came_to)}")
    assert came_to[ACCEPTED] + came_to[TROUBLED] > EXAMPLES / 5
    assert came_to[TROUBLED]
    assert came_to[REFUSED]
