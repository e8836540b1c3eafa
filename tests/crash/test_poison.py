"""A row that kills its process every time, and a supervisor that starts the process again."""

from __future__ import annotations

import signal
import time
from collections import Counter
from functools import partial

import pytest
from django.db import connection

from tests.contract.support.reports import assert_run
from tests.crash import processors, victims
from tests.crash.audit import effects
from tests.crash.processors import HANGS, KILLS, PLAIN, QUIT, QUITS
from tests.crash.rows import (
    FIRST,
    FOURTH,
    ROWS,
    SECOND,
    THIRD,
    fresh,
    rows,
    state,
    those,
    time_passes,
    work,
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
    assert_run(processors.short_lease())


FATAL = pytest.mark.parametrize(
    ("place", "ended"), [(KILLS, KILLED), (QUITS, QUIT)], ids=["killed", "os._exit"]
)
POISONED = ["transactional_retry", "transactional_retry_batch"]


@FATAL
@pytest.mark.parametrize("name", POISONED)
def test_transactional_it_kills_every_run_after_the_others_are_done(
    audit: str, name: str, place: int, ended: int
) -> None:
    """Nothing can count a kill that is rolled back; the note of the row puts it last."""
    fresh(*ROWS)
    set_place(SECOND, place)
    # A batch is rolled back as a whole, and it is not known which of its rows were handled.
    first = set() if "batch" in name else {FIRST}
    for done in (first, {FIRST, THIRD}, {FIRST, THIRD}):
        code, *_ = victims.run(name, audit)
        assert code == ended
        assert those(lambda row: row.done) == done
    assert those(lambda row: row.attempts) == set()
    assert work() == Counter([FIRST, THIRD])
    assert effects() == Counter({FIRST: 2 - len(first), SECOND: 3, THIRD: 1})

    set_place(SECOND, PLAIN)
    code, _, report = victims.run(name, audit)
    assert code == 0
    assert report is not None
    assert_run(report, processed=1)
    assert those(lambda row: row.done) == set(ROWS)
    assert work() == Counter(ROWS)


# Keys are refused there.
if connection.vendor != "mysql":

    @FATAL
    def test_transactional_in_order_its_key_comes_last_and_is_not_passed(
        audit: str, place: int, ended: int
    ) -> None:
        """The rows behind it wait with it, and the rows of other keys do not."""
        set_place(FIRST, place)
        Errand.objects.filter(pk=THIRD).update(result="another key")
        for _ in range(3):
            code, *_ = victims.run("transactional_in_order", audit)
            assert code == ended
        # Which of the keys comes first in the first run is chance.
        assert those(lambda row: row.done) == {THIRD}
        assert effects() == Counter({FIRST: 3, THIRD: 1})

        set_place(FIRST, PLAIN)
        code, _, report = victims.run("transactional_in_order", audit)
        assert code == 0
        assert report is not None
        assert_run(report, processed=2)
        assert work() == Counter(ROWS)


FOR_EVER = ["lease_for_ever", "lease_for_ever_batch", "lease_for_ever_async"]


@pytest.mark.parametrize("name", FOR_EVER)
def test_at_least_once_without_retry_it_kills_every_run_after_the_others_are_done(
    audit: str, name: str
) -> None:
    """Nothing counts its attempts. Each run begins when the lease of the one before has lapsed."""
    four = (*ROWS, FOURTH)
    fresh(*four)
    set_place(FIRST, KILLS)
    runs = 0
    # A batch is leased as a whole, and chance says which of its rows comes first in the next run.
    while those(lambda row: row.done) != {*four} - {FIRST}:
        assert runs < RESTARTS
        code, *_ = victims.run(name, audit)
        assert code == KILLED
        assert state(rows()[FIRST]) == "leased"
        time_passes()
        runs += 1
        assert effects() == Counter(those(lambda row: row.done)) + Counter({FIRST: runs})
        assert those(lambda row: row.done) >= ({THIRD, FOURTH} if runs > 1 else set())

    set_place(FIRST, PLAIN)
    code, _, report = victims.run(name, audit)
    assert code == 0
    assert report is not None
    assert_run(report, processed=1)
    assert those(lambda row: row.done) == set(four)


@pytest.mark.parametrize("when", ["before", "after"])
def test_i9_at_least_once_a_kill_while_a_lease_is_renewed(audit: str, when: str) -> None:
    set_place(FIRST, HANGS)
    act = partial(victims.run_until_renewal, when=when)
    assert victims.run("beating_lease", audit, act=act)[0] == KILLED
    assert those(lambda row: row.leased_until) == {FIRST}
    assert those(lambda row: row.attempts) == {FIRST}
    set_place(FIRST, PLAIN)
    time_passes()
    assert_run(processors.beating_lease(), processed=3)
    assert those(lambda row: row.done and row.leased_until is None) == set(ROWS)
    assert rows()[FIRST].attempts == 0  # a success clears them
    assert effects() == Counter([*ROWS, FIRST])
