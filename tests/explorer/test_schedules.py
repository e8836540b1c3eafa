"""I2 in every schedule of two workers and one row, and in some of more."""

from __future__ import annotations

import pytest

from tests.shares import is_whole

from .search import Priorities
from .stage import staged
from .subjects import (
    BEATING,
    BY_KEY,
    CHOOSING,
    HEADS,
    KEYED,
    KEYED_BATCHES,
    KEYED_WAITING,
    LAPSING,
    MODES,
    MORE,
    ONE_KEY,
    SUBJECTS,
    WAITING,
)

#: Schedules of a search that is not run whole here, but by ``make explore``: a number, and no
#: time, so that a busy machine looks at no fewer.
MOST = 100 if is_whole() else 40
#: The same, for rows of keys, whose schedules are longer.
MOST_KEYED = 25

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("name", SUBJECTS)
def test_i2_in_every_schedule_of_two_copies_and_one_row(name: str) -> None:
    with staged(SUBJECTS[name]) as stage:
        count = stage.explore()
    assert count.whole
    # Each of the two, alone and before the other; and one skipped what the other had.
    assert len(count.outcomes) >= 4


def test_schedules_that_are_left_out_would_have_told_nothing_new() -> None:
    """All of them, without any reduction but that of steps which no other actor sees."""
    with staged(SUBJECTS["transactional"]) as stage:
        reduced = stage.explore()
    with staged(SUBJECTS["transactional"]) as stage:
        whole = stage.explore(reduced=False)
    assert whole.schedules > 10 * reduced.schedules
    assert whole.outcomes == reduced.outcomes


@pytest.mark.parametrize("name", SUBJECTS)
def test_i2_in_random_schedules_of_two_copies_and_two_rows(name: str) -> None:
    """With every statement as a step of its own, those included that no other actor sees."""
    with staged(SUBJECTS[name], rows=2, every_statement=True) as stage:
        assert stage.sample(20).schedules == 20


@pytest.mark.parametrize("name", [*CHOOSING, *WAITING])
def test_i2_in_schedules_of_copies_that_choose_and_of_commits_that_wait(name: str) -> None:
    """A claim may choose among rows, and what is left of one row be sent with the next claim."""
    subject = {**CHOOSING, **WAITING}[name]
    with staged(subject, rows=2) as stage:
        count = stage.explore(most=MOST)
    assert count.whole or count.schedules >= 10
    with staged(subject, rows=3, every_statement=True) as stage:
        assert stage.sample(20).schedules == 20


@pytest.mark.parametrize("name", [*KEYED, *KEYED_BATCHES, *KEYED_WAITING])
def test_i2_in_schedules_of_two_copies_and_two_keys(name: str) -> None:
    """Three rows in two keys; the whole of it is ``make explore``'s."""
    subject = {**KEYED, **KEYED_BATCHES, **KEYED_WAITING}[name]
    with staged(subject, rows=3) as stage:
        count = stage.explore(most=MOST_KEYED)
    assert count.whole or count.schedules >= 5
    with staged(subject, rows=3, every_statement=True) as stage:
        assert stage.sample(10).schedules == 10


@pytest.mark.parametrize("name", ONE_KEY)
def test_i2_in_schedules_of_two_rows_of_one_key(name: str) -> None:
    with staged(ONE_KEY[name], rows=2) as stage:
        count = stage.explore(most=MOST_KEYED)
    assert count.whole or count.schedules >= 5


@pytest.mark.parametrize("name", HEADS)
def test_i2_no_row_is_handled_before_a_head_that_failed_or_waits(name: str) -> None:
    with staged(HEADS[name], rows=2) as stage:
        count = stage.explore(most=MOST)
    assert count.whole or count.schedules >= 5
    with staged(HEADS[name], rows=3, every_statement=True) as stage:
        assert stage.sample(10).schedules == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delivery", [name for name, *_ in BY_KEY])
def test_i2_an_earlier_row_may_be_put_back_while_another_of_its_key_is_in_flight(
    delivery: str, mode: str
) -> None:
    with staged(ONE_KEY[f"{delivery}_{mode}_one_key"], rows=2, edited=True) as stage:
        assert stage.sample(20, by=Priorities).schedules == 20


def test_i2_three_copies_have_as_many_rows_of_a_key_in_flight_as_may_be() -> None:
    with staged(KEYED["transactional_two_at_once"], workers=3, rows=5) as stage:
        assert stage.sample(20, by=Priorities).schedules == 20


@pytest.mark.parametrize("mode", MODES)
def test_i2_a_lease_that_lapses_lets_no_row_of_its_key_come_beside_it(mode: str) -> None:
    """Its heartbeat may be late."""
    subject = ONE_KEY[f"lease_{mode}_one_key"]
    with staged(subject, rows=2, lapse=True, hearts=1) as stage:
        count = stage.sample(50)
    assert any(report[3] for outcome in count.outcomes for report in outcome[:2])


def test_i2_a_lease_may_lapse_while_its_settlement_waits() -> None:
    with staged(WAITING["lease_rehearsed_waiting"], rows=2, lapse=True) as stage:
        count = stage.sample(100)
    assert any(report[3] for outcome in count.outcomes for report in outcome[:2])


def test_i2_a_heartbeat_while_a_settlement_waits_costs_nothing() -> None:
    subject = WAITING["lease_rehearsed_waiting"]
    with staged(subject, rows=2, workers=1, hearts=1, beats=2) as stage:
        assert len(stage.explore(most=MOST).outcomes) == 1


@pytest.mark.parametrize("name", ["lease_rehearsed", "lease"])
def test_i2_a_lease_that_lapses_at_any_step_ends_in_one_settlement(name: str) -> None:
    with staged(SUBJECTS[name], lapse=True) as stage:
        count = stage.explore(most=MOST)
    lost = [outcome for outcome in count.outcomes if any(report[3] for report in outcome[:2])]
    assert lost
    with staged(SUBJECTS[name], lapse=True, hearts=2, every_statement=True) as stage:
        stage.sample(50)


@pytest.mark.parametrize("name", ["lease_rehearsed", "lease", "lease_spanning"])
def test_i2_a_heartbeat_at_any_step_costs_nothing(name: str) -> None:
    with staged(SUBJECTS[name], workers=1, hearts=1) as stage:
        count = stage.explore()
    assert count.whole
    assert len(count.outcomes) == 1


@pytest.mark.parametrize("name", MORE)
def test_i2_of_rows_in_two_tables_and_of_rows_that_are_touched_meanwhile(name: str) -> None:
    """The whole of each is ``make explore``'s, as far as it takes longer than a few seconds."""
    edited = name.endswith("edited")
    with staged(MORE[name], edited=edited) as stage:
        assert stage.explore(most=MOST).schedules >= 5
    with staged(MORE[name], rows=2, edited=edited, every_statement=True) as stage:
        assert stage.sample(20).schedules == 20


@pytest.mark.parametrize("name", LAPSING)
def test_i2_such_a_row_may_be_taken_over_and_is_settled_once(name: str) -> None:
    with staged(MORE[name], lapse=True) as stage:
        count = stage.sample(100)
    assert any(report[3] for outcome in count.outcomes for report in outcome[:2])


@pytest.mark.parametrize("name", BEATING)
def test_i2_two_heartbeats_at_any_step_cost_such_a_row_nothing(name: str) -> None:
    with staged(MORE[name], workers=1, hearts=1, beats=2) as stage:
        assert len(stage.explore(most=MOST).outcomes) == 1


@pytest.mark.parametrize("name", ["transactional_edited", "claim_edited", "lease_edited"])
def test_i2_an_edit_at_any_step_of_a_copy_is_handled(name: str) -> None:
    with staged(MORE[name], workers=1, edited=True) as stage:
        count = stage.explore()
    assert count.whole
    assert count.schedules >= 5
