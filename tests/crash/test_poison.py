"""A row that kills its process every time, and a supervisor that starts the process again."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest

from tests.crash import processors, victims
from tests.crash.audit import effects
from tests.crash.processors import HANGS, KILLS, PLAIN
from tests.crash.rows import (
    FIRST,
    ROWS,
    SECOND,
    THIRD,
    counts,
    figures,
    fresh,
    rows,
    those,
    time_passes,
)
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True)

KILLED = -signal.SIGKILL
RESTARTS = 200  # at the most
PAUSE = 0.05  # seconds between two starts


def set_place(pk: int, place: int) -> None:
    Errand.objects.filter(pk=pk).update(place=place)


@pytest.fixture(autouse=True)
def _three_rows(nursery: None, audit: str) -> None:
    fresh(*ROWS)


def test_at_least_once_it_is_given_up_on_and_all_others_get_done(audit: str) -> None:
    """The lease of a second is waited for in real time."""
    set_place(FIRST, KILLS)
    codes: list[int | None] = []
    while not rows()[FIRST].dead:
        assert len(codes) < RESTARTS
        code, *_ = victims.run("short_lease", audit)
        codes.append(code)
        time.sleep(PAUSE)
    assert Counter(codes) == {KILLED: 3, 0: len(codes) - 3}
    assert effects() == Counter({FIRST: 3, SECOND: 1, THIRD: 1})
    assert those(lambda row: row.done) == {SECOND, THIRD}
    poison = rows()[FIRST]
    assert (poison.attempts, poison.leased_until, poison.next_attempt_at) == (3, None, None)
    assert "3 attempts" in poison.last_error
    assert figures(processors.short_lease()) == {}


def test_transactional_it_kills_every_run_after_the_others_are_done(audit: str) -> None:
    """Nothing can count a kill that is rolled back; the note of the row puts it last."""
    set_place(SECOND, KILLS)
    for done in ({FIRST}, {FIRST, THIRD}, {FIRST, THIRD}):
        code, *_ = victims.run("transactional_retry", audit)
        assert code == KILLED
        assert those(lambda row: row.done) == done
    assert those(lambda row: row.attempts) == set()
    assert effects() == Counter({FIRST: 1, SECOND: 3, THIRD: 1})


def test_at_most_once_it_kills_one_run_and_is_in_doubt(audit: str) -> None:
    set_place(SECOND, KILLS)
    codes = [victims.run("claim", audit)[0] for _ in range(3)]
    assert codes == [KILLED, 0, 0]
    assert those(lambda row: row.done) == {FIRST, THIRD}
    assert [row.pk for row in processors.claim.in_doubt(older_than=0)] == [SECOND]
    assert effects() == Counter(ROWS)


@pytest.mark.parametrize("when", ["before", "after"])
def test_i9_at_least_once_a_kill_while_a_lease_is_renewed(audit: str, when: str) -> None:
    set_place(FIRST, HANGS)
    assert victims.run_until_renewal("short_lease", audit, when) == KILLED
    assert those(lambda row: row.leased_until) == {FIRST}
    assert those(lambda row: row.attempts) == {FIRST}
    set_place(FIRST, PLAIN)
    time_passes()
    assert figures(processors.short_lease()) == counts(processed=3)
    assert those(lambda row: row.done and row.leased_until is None) == set(ROWS)
    assert rows()[FIRST].attempts == 0  # a success clears them
    assert effects() == Counter([*ROWS, FIRST])
