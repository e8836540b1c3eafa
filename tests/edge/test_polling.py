"""When a watched processor runs next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dcl_processor import Report, batch_processor
from dcl_processor.operator.times import LONGEST_BACKOFF
from dcl_processor.workers import watch
from dcl_processor.workers.watch import Turn, did_something
from tests.models import Parcel


@dataclass
class Clock:
    """A clock that stands still, so that a wait is what it says."""

    now: float = 1_000.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(watch, "time", CLOCK)
    return CLOCK


def turn() -> Turn:
    options: dict[str, Any] = {"pending": Parcel.objects.all(), "done": {"sent": True}}
    processor = batch_processor(**options)(lambda row: None)
    return Turn(processor, 5.0, due=CLOCK.now)


def after(turn: Turn, **counts: Any) -> float:
    """Return the seconds from the end of such a run until the next."""
    turn.ran(Report(name="p", **counts))
    return turn.due - CLOCK.now


def test_idle_waits_are_the_interval_and_part_of_each_is_random() -> None:
    idle = turn()
    waits = [after(idle) for _ in range(12)]
    assert all(3.75 <= wait <= 5 for wait in waits)
    assert len({round(wait, 3) for wait in waits}) > 1


@pytest.mark.parametrize(
    ("counts", "at_once"),
    [
        ({"processed": 1}, True),
        ({"discarded": 1}, True),
        ({"processed": 1, "stopped": "limit"}, True),
        ({"processed": 1, "stopped": "timeout"}, True),
        ({"processed": 9, "failed": 1, "stopped": "limit"}, True),
        # The same rows would be tried at once, and again, and again.
        ({"processed": 9, "failed": 1}, False),
        ({"processed": 9, "snoozed": 1}, False),
        ({"failed": 10, "stopped": "limit"}, False),
        ({"snoozed": 10, "stopped": "limit"}, False),
        ({"processed": 9, "failed": 2, "stopped": "failures"}, False),
        ({"skipped": 3}, False),
        ({"stale": 3}, False),
    ],
)
def test_it_goes_on_at_once_after_a_run_that_got_on(counts: dict[str, Any], at_once: bool) -> None:
    wait = after(turn(), **counts)
    assert wait == 0 if at_once else 3.75 <= wait <= 5


def test_a_wake_up_ends_the_wait(clock: Clock) -> None:
    woken = turn()
    after(woken)
    woken.wake()
    assert woken.due == clock.now
    assert after(woken) >= 3.75


def test_a_run_that_could_not_be_made_is_tried_later_each_time(clock: Clock) -> None:
    broken = turn()

    def wait() -> float:
        broken.broke()
        return broken.due - clock.now

    waits = [wait() for _ in range(12)]
    assert 0.5 <= waits[0] <= 1
    assert all(LONGEST_BACKOFF / 2 <= wait <= LONGEST_BACKOFF for wait in waits[-5:])
    broken.wake()  # of no use
    assert broken.due - clock.now == pytest.approx(waits[-1])
    after(broken)
    assert wait() <= 1


@pytest.mark.parametrize("count", ["processed", "failed", "discarded", "snoozed", "lease_lost"])
def test_rows_that_were_tried_are_worth_a_line(count: str) -> None:
    counts: dict[str, Any] = {count: 1}
    assert did_something(Report(name="p", **counts))


def test_what_others_did_is_not() -> None:
    assert not did_something(Report(name="p", skipped=1, stale=1))
