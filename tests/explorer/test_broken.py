"""The explorer can fail: it finds each variant of the core that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from . import broken
from .schedule import Violation
from .search import Priorities
from .stage import staged
from .subjects import ALL_KEYED, CHOOSING, MORE, SUBJECTS

pytestmark = pytest.mark.django_db(transaction=True)

SETTLED_TWICE = r"2 rows were reported as processed"
SETTLED_THRICE = r"3 rows were reported as processed"
BOTH_PROCESSED = r"two handlers of row \{1\}, 2 processed"
LOST_EDIT = r"rows \{7000001\} are left after a last run|are pending, and no copy"
LOST = r"a copy failed: .* 1 lease_lost"
WAITS = r"waits for another one's lock at: lock"
DOUBLE = r"two handlers of row|was handled after its flip was committed"

TWO_OF_A_KEY = r"rows of key 0 are in flight, of 1"
OVERTAKEN = r"row 2 was handled before \{7000001\} of its key"
EITHER = rf"{TWO_OF_A_KEY}|{OVERTAKEN}"

ALL = {**SUBJECTS, **MORE, **CHOOSING, **ALL_KEYED}
NO_SETTING: dict[str, Any] = {}
EDITED: dict[str, Any] = {"copies": 1, "edited": True}

#: Two rows of a key, and how the schedules begin that are searched: copy A is 0, copy B is 1, the
#: editor or the time is 2, and the heart of copy A comes last.
ROWS_OF_KEY: dict[str, Any] = {"rows": 2}
BOTH_CLAIM: dict[str, Any] = {
    **ROWS_OF_KEY,
    "after": [(0, "COMMIT"), (1, "COMMIT"), (1, "COMMIT"), (0, "handler"), (1, "handler")],
}
PUT_BACK: dict[str, Any] = {
    **ROWS_OF_KEY,
    "edited": True,
    "after": [
        *((1, "handler"), (1, "snapshot"), (1, "snapshot"), (1, "key lock")),
        *((2, ""), (0, "handler"), (1, "handler")),
    ],
}
PUT_BACK_FIRST: dict[str, Any] = {
    **PUT_BACK,
    "after": [(1, "handler"), (1, "key lock"), (2, ""), (1, "handler")],
}
PUT_BACK_MEANWHILE: dict[str, Any] = {
    **PUT_BACK,
    "after": [(1, "handler"), (1, "COMMIT"), (1, "handler"), (2, ""), (0, "handler")],
}
LATE: dict[str, Any] = {
    **ROWS_OF_KEY,
    "lapse": True,
    "hearts": 1,
    "after": [(0, "handler"), (1, "key lock"), (2, ""), (1, "is it ours?"), (3, "")],
}

CAUGHT = [
    (broken.no_second_check, "transactional", NO_SETTING, DOUBLE),
    (broken.no_second_check, "claim", NO_SETTING, DOUBLE),
    (broken.no_second_check, "lease", NO_SETTING, DOUBLE),
    (broken.check_in_the_lock_statement, "transactional_spanning", NO_SETTING, DOUBLE),
    (broken.check_in_the_lock_statement, "transactional_joined", NO_SETTING, DOUBLE),
    (broken.check_in_the_lock_statement, "claim_spanning", NO_SETTING, DOUBLE),
    (broken.check_in_the_lock_statement, "lease_spanning", NO_SETTING, DOUBLE),
    (broken.check_in_the_lock_statement, "transactional_joined_choosing", {"rows": 2}, DOUBLE),
    (broken.no_second_check, "claim_choosing", {"rows": 2}, DOUBLE),
    (broken.one_statement_for_all, "claim_spanning_rehearsed", NO_SETTING, DOUBLE),
    (broken.one_statement_for_all, "lease_spanning_rehearsed", NO_SETTING, DOUBLE),
    (broken.flip_outside_the_transaction, "transactional", NO_SETTING, DOUBLE),
    (
        broken.lock_without_skip,
        "transactional",
        NO_SETTING,
        r"waits for another one's lock at: lock",
    ),
    (broken.lock_without_skip, "claim", NO_SETTING, WAITS),
    (broken.lock_without_skip, "lease", NO_SETTING, WAITS),
    (broken.settle_without_comparing, "lease", {"lapse": True}, SETTLED_TWICE),
    (broken.settle_without_comparing, "lease_rehearsed", {"lapse": True}, SETTLED_TWICE),
    (broken.heartbeat_during_settle, "lease", {"copies": 1, "hearts": 1}, LOST),
    (broken.heartbeat_during_settle, "lease_rehearsed", {"copies": 1, "hearts": 1}, LOST),
    (broken.settle_table_by_table, "lease_two_tables", {"lapse": True}, SETTLED_TWICE),
    (broken.lease_on_the_instance, "lease_saving", {"lapse": True}, SETTLED_TWICE),
    (
        broken.first_and_last_lease,
        "lease_saving_another",
        {"copies": 1, "hearts": 1, "beats": 2},
        LOST,
    ),
    (broken.settle_without_comparing, "lease_pipeline", {"lapse": True}, SETTLED_THRICE),
    (broken.flip_outside_the_transaction, "transactional_edited", EDITED, LOST_EDIT),
    (broken.any_transaction, "transactional_ending", NO_SETTING, BOTH_PROCESSED),
    (broken.no_key_lock, "claim_by_key_one_key", BOTH_CLAIM, TWO_OF_A_KEY),
    (broken.no_key_lock, "lease_by_key_one_key", BOTH_CLAIM, TWO_OF_A_KEY),
    (broken.no_key_lock, "transactional_in_order_one_key", PUT_BACK_MEANWHILE, EITHER),
    (broken.siblings_in_the_lock_statement, "claim_by_key_one_key", PUT_BACK, TWO_OF_A_KEY),
    (broken.siblings_in_the_lock_statement, "lease_by_key_one_key", PUT_BACK, TWO_OF_A_KEY),
    (broken.lapsed_leases_are_left, "lease_by_key_one_key", LATE, TWO_OF_A_KEY),
    (broken.no_head, "claim_in_order_one_key", PUT_BACK_FIRST, OVERTAKEN),
]


#: Schedules that are searched behind a beginning.
MOST = 200


@pytest.mark.parametrize(
    ("variant", "name", "setting", "words"),
    CAUGHT,
    ids=[f"{variant.__name__}-{name}" for variant, name, *_ in CAUGHT],
)
def test_a_broken_variant_is_found(
    variant: Callable[[], AbstractContextManager[None]],
    name: str,
    setting: dict[str, Any],
    words: str,
) -> None:
    setting, after = {**setting}, setting.get("after", ())
    setting.pop("after", None)
    with (
        variant(),
        staged(ALL[name], **setting) as stage,
        pytest.raises(Violation, match=words) as error,
    ):
        stage.explore(after=after, most=MOST if after else math.inf)
    [note] = error.value.__notes__
    assert "copy A" in note
    assert f"EXPLORE={name}:" in note

    # What was printed is enough to see it again.
    digits = note.rpartition(":")[2].split()[0]
    with (
        variant(),
        staged(ALL[name], **setting) as stage,
        pytest.raises(Violation, match=words),
    ):
        stage.replay(digits)


def test_random_schedules_of_few_switches_find_two_rows_of_a_key() -> None:
    with (
        broken.no_key_lock(),
        staged(ALL["transactional_by_key_one_key"], **ROWS_OF_KEY) as stage,
        pytest.raises(Violation, match=TWO_OF_A_KEY),
    ):
        stage.sample(MOST, by=Priorities)


@pytest.mark.parametrize(
    ("name", "setting"),
    [(name, setting) for _, name, setting, _ in CAUGHT if "after" in setting],
)
def test_i2_schedules_that_begin_as_those_of_broken_variants_go_right(
    name: str, setting: dict[str, Any]
) -> None:
    setting = {**setting}
    after = setting.pop("after")
    with staged(ALL[name], **setting) as stage:
        count = stage.explore(after=after, most=10)
    assert count.schedules


DECISIVE = ["transactional_spanning", "transactional_joined", "claim_spanning"]


@pytest.mark.parametrize("name", DECISIVE)
def test_schedules_of_whole_statements_do_not_reach_the_decisive_race(name: str) -> None:
    """Every one of them passes on a variant that the point inside the claim finds out."""
    with (
        broken.check_in_the_lock_statement(),
        staged(SUBJECTS[name], gates=False) as stage,
    ):
        count = stage.explore()
    assert count.whole
    with (
        broken.check_in_the_lock_statement(),
        staged(SUBJECTS[name]) as stage,
        pytest.raises(Violation, match=DOUBLE),
    ):
        stage.explore()
