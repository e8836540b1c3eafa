"""I2 in every schedule of two workers and one row, and in some of more.

``SECONDS`` is what each search of more may take (``make explore``). ``EXPLORE=…`` is the one
schedule that a failure has printed, and is drawn.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.shares import is_whole

from .search import Parts, Priorities
from .stage import SECONDS, staged
from .subjects import (
    BEATING,
    BY_KEY,
    CHOOSING,
    EDITED,
    EVERY,
    HEADS,
    KEYED,
    KEYED_BATCHES,
    LAPSING,
    MODES,
    MORE,
    ONE_KEY,
    SUBJECTS,
)

#: Schedules of a search that is not run whole here: a number, and no time, so that a busy machine
#: looks at no fewer.
MOST = 100 if is_whole() else 40
#: The same, for rows of keys, whose schedules are longer, and for beginnings that are given.
MOST_KEYED = 25
MOST_BEGUN = 200 if is_whole() else 10

WRITTEN = os.environ.get("EXPLORE", "")

pytestmark = [
    pytest.mark.django_db(transaction=True),
    *([pytest.mark.timeout(0)] if SECONDS else []),
]


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


SIZES = [(2, 2), *([(3, 1), (2, 3), (3, 3)] if SECONDS else [])]


@pytest.mark.parametrize(("workers", "rows"), SIZES)
@pytest.mark.parametrize("name", [*SUBJECTS, *MORE])
def test_i2_in_random_schedules(name: str, workers: int, rows: int) -> None:
    """With every statement as a step of its own, those included that no other actor sees."""
    edited = name.endswith("edited")
    with staged(
        EVERY[name], workers=workers, rows=rows, edited=edited, every_statement=True
    ) as stage:
        assert stage.sample(20).schedules >= 20


LAPSE, HEART, ONE = {"lapse": True}, {"hearts": 1}, {"workers": 1}
LEASES = [name for name in SUBJECTS if name.startswith("lease")]
LEASES_OF_KEYS = [name for name in ONE_KEY if name.startswith("lease")]
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"rows": 2}) for name in [*SUBJECTS, *MORE]),
    *((name, {**LAPSE, **HEART}) for name in LEASES),
    *((name, HEART) for name in LEASES),
    *((name, LAPSE) for name in LAPSING),
    *((each.name, {"edited": True}) for each in EDITED),
    *((name, {"rows": 2, "edited": True}) for name in ONE_KEY),
    *((name, {"rows": 2, **how}) for how in (LAPSE, {**LAPSE, **HEART}) for name in LEASES_OF_KEYS),
]


@pytest.mark.parametrize(("name", "setting"), SETTINGS, ids=str)
def test_i2_in_schedules_of_more_rows_leases_and_edits(name: str, setting: dict[str, Any]) -> None:
    with staged(EVERY[name], **setting) as stage:
        assert stage.explore(most=10).schedules


if WRITTEN:

    def test_the_schedule_that_was_written_down() -> None:
        name, size, *every, digits = WRITTEN.split(":")
        size, _, others = size.partition("+")
        workers, rows = map(int, size.split("x"))
        setting: dict[str, Any] = {"lapse": "t" in others, "edited": "e" in others}
        setting["dies"] = "d" in others
        setting |= {"hearts": others.lower().count("h"), "beats": 1 + ("H" in others)}
        setting |= {"every_statement": bool(every)}
        with staged(EVERY[name], workers=workers, rows=rows, **setting) as stage:
            print(f"\n{name}\n\n{stage.replay(digits)}\n")


@pytest.mark.parametrize("name", CHOOSING)
def test_i2_in_schedules_of_copies_that_choose(name: str) -> None:
    subject = CHOOSING[name]
    with staged(subject, rows=2) as stage:
        count = stage.explore(most=MOST)
    assert count.whole or count.schedules >= 10
    with staged(subject, rows=3, every_statement=True) as stage:
        assert stage.sample(20).schedules >= 20


@pytest.mark.parametrize("name", [*KEYED, *KEYED_BATCHES])
def test_i2_in_schedules_of_two_copies_and_two_keys(name: str) -> None:
    """Three rows in two keys."""
    subject = {**KEYED, **KEYED_BATCHES}[name]
    with staged(subject, rows=3) as stage:
        count = stage.explore(most=MOST_KEYED)
    assert count.whole or count.schedules >= 5
    with staged(subject, rows=3, every_statement=True) as stage:
        assert stage.sample(10).schedules >= 10


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
        assert stage.sample(10).schedules >= 10


#: Where copies race for two rows of a key, and how these schedules begin: copy A is 0, copy B is 1,
#: the editor or the time is 2, and the heart of copy A comes last.
BOTH_CLAIM = [(0, "COMMIT"), (1, "COMMIT"), (1, "COMMIT"), (0, "handler"), (1, "handler")]
PUT_BACK = [
    *((1, "handler"), (1, "snapshot"), (1, "snapshot"), (1, "key lock")),
    *((2, ""), (0, "handler"), (1, "handler")),
]
PUT_BACK_FIRST = [(1, "handler"), (1, "key lock"), (2, ""), (1, "handler")]
PUT_BACK_MEANWHILE = [(1, "handler"), (1, "COMMIT"), (1, "handler"), (2, ""), (0, "handler")]
LATE = [(0, "handler"), (1, "key lock"), (2, ""), (1, "is it ours?"), (3, "")]
EDITS: dict[str, Any] = {"edited": True}
LAPSING_LATE: dict[str, Any] = {"lapse": True, "hearts": 1}


@pytest.mark.parametrize(
    ("name", "setting", "after"),
    [
        ("claim_by_key", {}, BOTH_CLAIM),
        ("lease_by_key", {}, BOTH_CLAIM),
        ("claim_by_key", EDITS, PUT_BACK),
        ("lease_by_key", EDITS, PUT_BACK),
        ("claim_in_order", EDITS, PUT_BACK_FIRST),
        ("transactional_in_order", EDITS, PUT_BACK_MEANWHILE),
        ("lease_by_key", LAPSING_LATE, LATE),
    ],
)
def test_i2_in_schedules_that_begin_with_a_race_for_one_key(
    name: str, setting: dict[str, Any], after: Parts
) -> None:
    with staged(ONE_KEY[f"{name}_one_key"], rows=2, **setting) as stage:
        assert stage.explore(after=after, most=MOST_BEGUN).schedules


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("delivery", BY_KEY)
def test_i2_an_earlier_row_may_be_put_back_while_another_of_its_key_is_in_flight(
    delivery: str, mode: str
) -> None:
    with staged(ONE_KEY[f"{delivery}_{mode}_one_key"], rows=2, edited=True) as stage:
        assert stage.sample(20, by=Priorities).schedules >= 20


@pytest.mark.parametrize("name", KEYED if SECONDS else ["transactional_two_at_once"])
def test_i2_three_copies_have_as_many_rows_of_a_key_in_flight_as_may_be(name: str) -> None:
    with staged(KEYED[name], workers=3, rows=5, every_statement=bool(SECONDS)) as stage:
        assert stage.sample(20, by=Priorities).schedules >= 20


@pytest.mark.parametrize("mode", MODES)
def test_i2_a_lease_that_lapses_lets_no_row_of_its_key_come_beside_it(mode: str) -> None:
    """Its heartbeat may be late."""
    subject = ONE_KEY[f"lease_{mode}_one_key"]
    with staged(subject, rows=2, lapse=True, hearts=1) as stage:
        count = stage.sample(50)
    assert any(report[3] for outcome in count.outcomes for report in outcome[:2])


@pytest.mark.parametrize("name", ["lease_trying", "lease"])
def test_i2_a_lease_that_lapses_at_any_step_ends_in_one_settlement(name: str) -> None:
    with staged(SUBJECTS[name], lapse=True) as stage:
        count = stage.explore(most=MOST)
    lost = [outcome for outcome in count.outcomes if any(report[3] for report in outcome[:2])]
    assert lost
    with staged(SUBJECTS[name], lapse=True, hearts=2, every_statement=True) as stage:
        stage.sample(50)


@pytest.mark.parametrize("name", ["lease_trying", "lease", "lease_spanning"])
def test_i2_a_heartbeat_at_any_step_costs_nothing(name: str) -> None:
    with staged(SUBJECTS[name], workers=1, hearts=1) as stage:
        count = stage.explore()
    assert count.whole
    assert len(count.outcomes) == 1


@pytest.mark.parametrize("name", MORE)
def test_i2_of_rows_that_are_touched_meanwhile(name: str) -> None:
    with staged(MORE[name], edited=name.endswith("edited")) as stage:
        assert stage.explore(most=MOST).schedules >= 5


@pytest.mark.parametrize("name", LAPSING)
def test_i2_such_a_row_may_be_taken_over_and_is_settled_once(name: str) -> None:
    with staged(MORE[name], lapse=True) as stage:
        count = stage.sample(100)
    assert any(report[3] for outcome in count.outcomes for report in outcome[:2])


@pytest.mark.parametrize("name", BEATING)
def test_i2_two_heartbeats_at_any_step_cost_such_a_row_nothing(name: str) -> None:
    with staged(MORE[name], workers=1, hearts=1, beats=2) as stage:
        assert len(stage.explore(most=MOST).outcomes) == 1


def test_i2_an_edit_at_any_step_of_a_copy_is_handled() -> None:
    with staged(MORE["transactional_edited"], workers=1, edited=True) as stage:
        count = stage.explore()
    assert count.whole
    assert count.schedules >= 5


# --- workers that die


DYING = [*SUBJECTS, "lease_marked", "lease_marked_trying", "transactional_ending"]


@pytest.mark.parametrize("name", DYING)
def test_i9_a_copy_that_dies_at_any_step_beside_another_one(name: str) -> None:
    """Its locks are free at once; its lease lapses; what it has claimed is in doubt."""
    with staged(EVERY[name], dies=True) as stage:
        count = stage.explore(most=MOST)
    assert count.whole or count.schedules >= 10
    with staged(EVERY[name], dies=True, rows=2, every_statement=True) as stage:
        assert stage.sample(20, by=Priorities).schedules >= 20


@pytest.mark.parametrize("name", LEASES)
def test_i9_a_copy_that_dies_under_a_lease_that_lapses(name: str) -> None:
    with staged(SUBJECTS[name], dies=True, lapse=True, hearts=1) as stage:
        assert stage.explore(most=MOST_KEYED).schedules
        assert stage.sample(20, by=Priorities).schedules >= 20
