"""How long a run waits for rows that others have locked, and in which steps."""

from __future__ import annotations

import math
from threading import Event

import pytest

from dcl_processor.runner import limits

TIMEOUT, LONGER = 20.0, 40.0


class Frozen(Event):
    """A clock that stands still, and a stop whose waiting alone puts it forward."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def monotonic(self) -> float:
        return math.fsum(self.waited)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Frozen:
    clock = Frozen()
    monkeypatch.setattr(limits, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("timeout", "wait_for_locked"), [(None, TIMEOUT), (TIMEOUT, LONGER), (LONGER, TIMEOUT)]
)
def test_waits_grow_and_end_with_the_shorter_of_the_two_times(
    clock: Frozen, timeout: float | None, wait_for_locked: float
) -> None:
    plan = limits.Limits(limit=None, timeout=timeout, wait_for_locked=wait_for_locked, stop=clock)
    assert all(plan.waits())
    *waited, last = clock.waited
    assert clock.monotonic() == pytest.approx(TIMEOUT)
    longest = [min(limits.FIRST_WAIT * 2**n, limits.LONGEST_WAIT) for n in range(len(waited))]
    assert all(most / 2 <= each <= most for each, most in zip(waited, longest, strict=True))
    assert last <= limits.LONGEST_WAIT
    # Copies that met once must not meet again.
    assert len(set(waited[-10:])) == 10


def test_a_run_that_may_not_wait_does_not(clock: Frozen) -> None:
    plan = limits.Limits(limit=None, timeout=None, wait_for_locked=0, stop=clock)
    assert list(plan.waits()) == clock.waited == []
