"""The search can fail: it finds each variant of the core that is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis.errors import FlakyFailure

from dcl_processor import Delivery
from tests.fuzz.broken import BROKEN, IN_TROUBLE, OF_KEYS, OF_STEADY_RUNS
from tests.fuzz.cases import keyed_cases, plain_cases, steady_cases, working_cases
from tests.fuzz.test_fuzz import search

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
]


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
    made = working_cases(delivery) if break_it in IN_TROUBLE else plain_cases(delivery)
    if break_it in OF_KEYS:
        made = keyed_cases(delivery)
    elif break_it in OF_STEADY_RUNS:
        made = steady_cases(delivery, lapses=True)

    def is_found() -> bool:
        # A race that goes wrong need not do so when it is played again.
        with pytest.raises((AssertionError, FlakyFailure)) as caught:
            search(made, 400, derandomize=True, shrink=False)
        found = caught.value
        return not isinstance(found, FlakyFailure) or found.subgroup(AssertionError) is not None

    # What is played again may fail in another way, and then the search has shown nothing.
    assert any(is_found() for _ in range(3))
