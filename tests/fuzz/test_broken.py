"""The search can fail: it finds each variant of the core that is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

from dcl_processor import Delivery
from tests.fuzz.broken import BROKEN, attempts_that_stay, no_key_lock, unread_answer
from tests.fuzz.cases import Case, keyed_cases, plain_cases, steady_cases, working_cases
from tests.fuzz.test_fuzz import search

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


@pytest.mark.parametrize(
    ("delivery", "break_it"),
    [(delivery, each) for each, deliveries in BROKEN.items() for delivery in deliveries],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_broken_variant_is_found(
    delivery: Delivery,
    break_it: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", "dcl_processor")
    break_it(monkeypatch)
    # Where handlers do more than succeed, rows have keys, or a flip waits for the next claim.
    where: dict[object, SearchStrategy[Case]] = {
        attempts_that_stay: working_cases(delivery),
        no_key_lock: keyed_cases(delivery),
        unread_answer: steady_cases(delivery, lapses=True),
    }
    made = where.get(break_it, plain_cases(delivery))

    def is_found() -> bool:
        # A race that goes wrong need not do so when it is played again.
        with pytest.raises((AssertionError, FlakyFailure)) as caught:
            search(made, 400, derandomize=True, shrink=False)
        found = caught.value
        return not isinstance(found, FlakyFailure) or found.subgroup(AssertionError) is not None

    # What is played again may fail in another way, and then the search has shown nothing.
    assert any(is_found() for _ in range(3))
