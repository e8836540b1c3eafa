"""What the monitor makes of calls that are late, by looks that the tests take themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcl_processor.engine import calls
from dcl_processor.engine.calls import Limited
from dcl_processor.pending import steady as time
from dcl_processor.workers import monitor
from dcl_processor.workers.monitor import GRACE, Monitor


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Limited]:
    """Return the calls for which the process would have ended."""
    found: list[Limited] = []
    monkeypatch.setattr(monitor, "end", found.append)
    return found


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    yield
    calls.limited.clear()


def under_way(age: float, limit: float = 60.0) -> Limited:
    call = Limited("shop.send", [17], time.monotonic() - age, limit)
    calls.limited.add(call)
    return call


def look(watching: Monitor, times: int) -> None:
    for _ in range(times):
        watching._look()


def test_a_call_has_its_grace_from_the_look_at_which_it_is_late(ended: list[Limited]) -> None:
    """However late it is then: the whole machine may have been stopped for an hour."""
    watching = Monitor(lambda: None)
    call = under_way(3_600)
    look(watching, GRACE)
    assert ended == []
    look(watching, 1)
    assert ended == [call]


def test_calls_within_their_limit_and_those_that_have_ended_are_no_matter(
    ended: list[Limited],
) -> None:
    watching = Monitor(lambda: None)
    under_way(50)
    late = under_way(70)
    look(watching, GRACE)
    calls.limited.discard(late)
    look(watching, GRACE)
    assert ended == []


def test_of_several_the_oldest_is_named_first(ended: list[Limited]) -> None:
    """It may be what keeps the others on its event loop from their end."""
    watching = Monitor(lambda: None)
    younger, oldest = under_way(100), under_way(200)
    look(watching, GRACE + 1)
    assert ended == [oldest, younger]


def test_a_call_that_follows_a_late_one_has_its_own_grace(ended: list[Limited]) -> None:
    watching = Monitor(lambda: None)
    first = under_way(100)
    look(watching, GRACE)
    calls.limited.discard(first)
    under_way(100)
    look(watching, GRACE)
    assert ended == []


def test_an_error_of_what_shows_the_health_ends_no_look() -> None:
    seen: list[int] = []

    def beat() -> None:
        seen.append(1)
        raise OSError("no space left on the device")

    watching = Monitor(beat, 0.001)
    with watching:
        while len(seen) < 3:
            time.sleep(0.001)
    assert not watching._thread.is_alive()
