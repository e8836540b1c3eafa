"""An interrupt at any line of the engine: nothing is left open, and the next run goes on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from django.db import connection
from django.db.models import F

from tests.contract.support import errands as the
from tests.models import Errand
from tests.shares import points
from tests.waiting import until

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # Between two lines that open something and keep it, the collector closes it.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

ROWS = 4


class Interrupt:
    """Raises ``KeyboardInterrupt`` in this thread, at so many lines of the engine."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        path = Path(frame.f_code.co_filename)
        # Between the block of a lock and its release Python sees no signal, but a trace is called.
        is_inside = path.parent.name == "engine" and path.stem != "heartbeat"
        return self.line if is_inside and self.left > 0 else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                print(f"interrupted at {frame.f_code.co_filename}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return self.line


def interrupted(run: Callable[[], Any], at: int) -> bool:
    """Run, and return whether it was interrupted."""
    sys.settrace(interrupt := Interrupt(at))
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return interrupt.left <= 0


def here(row: Errand) -> None:
    Errand.objects.filter(pk=row.pk).update(place=F("place") + 100)


async def on_a_loop(row: Errand) -> None:
    await Errand.objects.filter(pk=row.pk).aupdate(place=F("place") + 100)


WAYS: dict[str, Callable[[], Any]] = {
    "transactional": lambda: the.transactional(here),
    "transactional, in batches": lambda: the.transactional(here, batch_size=3),
    "at most once": lambda: the.at_most_once(here, batch_size=2),
    "at least once": lambda: the.at_least_once(here, batch_size=2),
    "threads": lambda: the.at_least_once(here, concurrency=2),
    "event loop": lambda: the.at_least_once(on_a_loop, concurrency=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_i10_an_interrupt_at_any_line_of_the_engine_leaves_nothing_open(way: str) -> None:
    process = the.proven(WAYS[way]())
    sessions = the.sessions()
    tried = 0

    def at(line: int) -> bool:
        Errand.objects.all().delete()
        the.errands(ROWS)
        was_interrupted = interrupted(process, line)
        check_after(process, way, sessions)
        return was_interrupted

    for line in takewhile(at, (each + 1 for each in points(f"interrupted {way}", 60))):
        tried = line
    assert tried > 100


def check_after(process: Any, way: str, sessions: set[int]) -> None:
    """Judge what is left, and run again when the leases have lapsed."""
    until(lambda: not the.our_threads(), "the threads to end")
    assert not connection.in_atomic_block
    assert not connection.execute_wrappers
    until(lambda: the.sessions() <= sessions, "the sessions to end")
    Errand.objects.filter(leased_until__isnull=False).update(
        leased_until=F("leased_until") - timedelta(minutes=5)
    )
    process()
    calls = Counter(place // 100 for place in Errand.objects.values_list("place", flat=True))
    done = Errand.objects.filter(done=True).count()
    claimed = Errand.objects.filter(claimed=True, done=False).count()
    assert done + claimed == ROWS
    if way.startswith("transactional"):
        assert calls == {1: ROWS}
    elif way == "at most once":
        assert calls.keys() <= {0, 1}
    else:
        assert not claimed
        assert 0 not in calls
