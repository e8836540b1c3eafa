"""The explorer can fail: it finds each variant of the core that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from . import broken
from .schedule import Violation
from .stage import staged
from .subjects import ALL_KEYED, MORE, SUBJECTS

pytestmark = pytest.mark.django_db(transaction=True)

SETTLED_TWICE = r"2 rows were reported as processed"
BOTH_PROCESSED = r"two handlers of row \{1\}, 2 processed"
LOST_EDIT = r"rows \{7000001\} are left after a last run|are pending, and no copy"
LOST = r"a copy failed: .* 1 lease_lost"
WAITS = r"waits for another one's lock at: lock"
DOUBLE = r"two handlers of row|was handled after its flip was committed"

TWO_OF_A_KEY = r"rows of key 0 are in flight, of 1"
OVERTAKEN = r"row 2 was handled before \{7000001\} of its key"
EITHER = rf"{TWO_OF_A_KEY}|{OVERTAKEN}"

ALL = {**SUBJECTS, **MORE, **ALL_KEYED}
NO_SETTING: dict[str, Any] = {}
EDITED: dict[str, Any] = {"workers": 1, "edited": True}

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
    (broken.check_in_the_lock_statement, "transactional_joined", NO_SETTING, DOUBLE),
    (broken.flip_outside_the_transaction, "transactional", NO_SETTING, DOUBLE),
    (broken.flip_outside_the_transaction, "transactional_edited", EDITED, LOST_EDIT),
    (broken.any_transaction, "transactional_ending", NO_SETTING, BOTH_PROCESSED),
    (broken.lock_without_skip, "transactional", NO_SETTING, WAITS),
    (broken.settle_without_comparing, "lease", {"lapse": True}, SETTLED_TWICE),
    (broken.heartbeat_during_settle, "lease", {"workers": 1, "hearts": 1}, LOST),
    (broken.no_key_lock, "claim_by_key_one_key", BOTH_CLAIM, TWO_OF_A_KEY),
    (broken.no_key_lock, "transactional_in_order_one_key", PUT_BACK_MEANWHILE, EITHER),
    (broken.lapsed_leases_are_left, "lease_by_key_one_key", LATE, TWO_OF_A_KEY),
    (broken.no_head, "claim_in_order_one_key", PUT_BACK_FIRST, OVERTAKEN),
]
#: Subjects with the beginnings of schedules that go wrong in a variant.
BEGINNINGS = [
    *((name, setting) for _, name, setting, _ in CAUGHT if "after" in setting),
    *((f"{delivery}_by_key_one_key", PUT_BACK) for delivery in ("claim", "lease")),
    ("lease_by_key_one_key", BOTH_CLAIM),
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
    with variant(), staged(ALL[name], **setting) as stage, pytest.raises(Violation, match=words):
        stage.replay(digits)


@pytest.mark.parametrize(("name", "setting"), BEGINNINGS)
def test_i2_schedules_that_begin_as_those_of_broken_variants_go_right(
    name: str, setting: dict[str, Any]
) -> None:
    setting = {**setting}
    after = setting.pop("after")
    with staged(ALL[name], **setting) as stage:
        count = stage.explore(after=after, most=10)
    assert count.schedules
