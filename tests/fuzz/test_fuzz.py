"""Generated questions and flips: each is refused by name, or two workers get it right."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import connection
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from dcl_processor import Delivery
from dcl_processor.engine import session
from tests import seams
from tests.contract.support.messages import SENDS_SEVERAL
from tests.fuzz.cases import STRANGER, Case, cases, steady_cases, working_cases
from tests.fuzz.verdict import ACCEPTED, REFUSED, TROUBLED, judge
from tests.shares import is_whole

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: Make it larger to search for longer than a suite has the time for, with another seed each time.
FUZZ = int(os.environ.get("FUZZ", "0"))
EXAMPLES = FUZZ or (50 if is_whole() else 25)

#: Of what was accepted, that which two workers met at.
RACED = "raced"


def search(examples_of: st.SearchStrategy[Case], examples: int = EXAMPLES) -> Counter[str]:
    """Judge so many examples; return how many came to what."""
    came_to: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=not FUZZ,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
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

    if FUZZ and (given_seed := os.environ.get("FUZZ_SEED")):
        each = seed(int(given_seed))(each)
    each()
    return came_to


@pytest.mark.timeout(max(600, 5 * FUZZ))
@pytest.mark.parametrize("delivery", Delivery)
def test_a_generated_pair_is_refused_by_name_or_goes_right(
    delivery: Delivery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I1 to I6 and I11."""
    caplog.set_level("CRITICAL", "dcl_processor")  # a failed row says so, and many do
    came_to = search(cases(delivery))
    pairs = sum(came_to.values()) - came_to[RACED]
    print(f"\n{connection.vendor}, {delivery}: {pairs} pairs: {dict(came_to)}")
    handled = came_to[ACCEPTED] + came_to[TROUBLED]
    # Of few pairs, most may come to the same.
    assert handled > EXAMPLES / 5 if FUZZ else handled
    assert (came_to[TROUBLED] and came_to[REFUSED]) or not FUZZ


def count_waiting(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the flips that are sent with a statement that came later, by that one's first word."""
    counts: Counter[str] = Counter()

    def send_together(cursor: Any, statements: Sequence[Any]) -> Any:
        *earlier, last = [each.sql for each in statements]
        if last.startswith(("SELECT", "WITH dcl_taken")):
            counts[last.split(None, 1)[0]] += sum("UPDATE" in sql for sql in earlier)
        return session.in_one_message(cursor, statements)

    seams.replace(patch, seams.SEND_TOGETHER, send_together)
    return counts


@pytest.mark.timeout(max(600, 5 * FUZZ))
@pytest.mark.parametrize("delivery", Delivery)
def test_generated_rows_go_right_whose_flips_wait_for_the_next_claim(
    delivery: Delivery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I1 to I6: among failing and repeated rows and another copy; in long searches lapses, too."""
    caplog.set_level("CRITICAL", "dcl_processor")
    waited = count_waiting(monkeypatch)
    lapses = bool(FUZZ) or is_whole()
    came_to = search(steady_cases(delivery, lapses=lapses))
    print(f"\n{connection.vendor}, {delivery}: {waited.total()} flips waited: {dict(came_to)}")
    assert waited.total() > EXAMPLES / 5 or not SENDS_SEVERAL
    assert came_to[TROUBLED] > EXAMPLES / 2


@pytest.mark.timeout(max(600, 5 * FUZZ))
def test_generated_rows_go_right_that_have_a_mark_beside_their_lease(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I1 to I6: whatever takes the lease off writes reset, and the row stays pending meanwhile."""
    caplog.set_level("CRITICAL", "dcl_processor")
    marked = working_cases(Delivery.AT_LEAST_ONCE).filter(lambda case: case.claim is not None)
    examples = FUZZ or 10
    came_to = search(marked, examples)
    print(f"\n{connection.vendor}: {dict(came_to)}")
    assert came_to[TROUBLED] > examples / 2
