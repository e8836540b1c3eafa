"""I9: what a process killed at any statement leaves, and what the next copy makes of it.

Each processor runs once undisturbed, and every boundary that it passes is noted. Then it is
killed at each of them, and what is left is compared with what its delivery promises, which depends
on three facts: was the row's claim committed, had its effect happened, was its outcome committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from dcl_processor import BatchProcessor, Delivery
from tests.contract.support.reports import assert_run
from tests.crash import left as behind
from tests.crash import victims
from tests.crash.audit import effects, effects_in_order
from tests.crash.left import Left, rows_of
from tests.crash.rows import FIRST, fresh, rows, state, those, time_passes, work
from tests.crash.trace import Boundary

pytestmark = pytest.mark.django_db(transaction=True)


def kill_at_each(
    name: str,
    audit: str,
    check: Callable[[BatchProcessor[Any], Left], None],
    fails: int | None = None,
) -> None:
    """Run undisturbed; then kill the process at each of its boundaries, and check what is left."""
    all_rows = rows_of(name)
    boundaries = boundaries_of(name, audit, all_rows, fails)

    def check_states(processor: BatchProcessor[Any], left: Left) -> None:
        assert {state(row) for row in rows().values()} <= ALLOWED[processor.delivery]
        check(processor, left)

    behind.kill_at_each(name, audit, boundaries, check_states, all_rows=all_rows, fails=fails)


def boundaries_of(
    name: str, audit: str, all_rows: frozenset[int], fails: int | None = None
) -> list[Boundary]:
    """Run undisturbed, and return what is passed."""
    fresh(*all_rows, fails=fails)
    Path(audit).write_text("")
    code, boundaries, report = victims.run(name, audit, all_rows)
    assert code == 0
    # Every processor whose handler fails has a retry.
    failed = 0 if fails is None else 1
    assert_run(report, processed=len(all_rows) - failed, failed=failed, to_retry=failed)
    assert effects() == Counter(all_rows)
    return boundaries


#: The states that a row may be left in.
ALLOWED = {
    Delivery.TRANSACTIONAL: {"pending", "done"},
    Delivery.AT_MOST_ONCE: {"pending", "done", "in doubt"},
    Delivery.AT_LEAST_ONCE: {"pending", "done", "leased", "marked"},
}


# --- which boundaries there are


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("transactional", "lock, UPDATE, ROLLBACK TO, the effect, UPDATE, COMMIT"),
        ("transactional_spanning", "lock, SELECT, UPDATE, ROLLBACK TO, the effect, UPDATE, COMMIT"),
        # Where there is RETURNING, the claim locks, marks and commits in one statement.
        ("at_most_once", "lock, UPDATE, ROLLBACK, lock, the effect"),
        ("claim", "lock, UPDATE, ROLLBACK, lock, the effect, UPDATE"),
        ("lease", "lock, UPDATE, ROLLBACK, lock, the effect, UPDATE"),
    ],
)
def test_the_boundaries_of_the_table_are_among_those_that_are_tried(
    nursery: None, audit: str, name: str, steps: str
) -> None:
    passed = iter(boundaries_of(name, audit, rows_of(name)))
    for step in steps.split(", "):
        for when in ("before", "after"):
            looked_for = f"{when} {step}"
            assert any(each.name.startswith(looked_for) for each in passed), looked_for


#: How many rows of a key may be in flight; on MariaDB keys are refused.
MODES = {} if connection.vendor == "mysql" else {"by_key": 1, "in_order": 1, "two_at_once": 2}


def in_keys(family: str) -> list[str]:
    """Name the processors of a family whose rows have one key."""
    return [f"{family}_{mode}" for mode in MODES]


def run_beside(processor: BatchProcessor[Any], name: str, left: Left, held: set[int]) -> set[int]:
    """Run while ``held`` may keep its place in the key of all rows; return what was kept waiting.

    What was handled counts as left by this run.
    """
    rest = set(left.rows - left.claimed)
    most = [most for mode, most in MODES.items() if name.endswith(mode)]
    waiting = rest if most and len(held) >= most[0] else set()
    report = processor()
    assert_run(report, processed=len(rest - waiting), held=len(waiting))
    left.claimed |= rest - waiting
    left.settled |= rest - waiting
    left.effects += Counter(rest - waiting)
    assert effects() == left.effects
    assert those(lambda row: row.done) == left.rows - held - waiting
    return waiting


def check_order(name: str) -> None:
    """Check that no row was handled before an earlier one, however often each was."""
    if name.endswith("in_order"):
        assert effects_in_order() == sorted(effects_in_order())


# --- TRANSACTIONAL


TRANSACTIONAL = [*("transactional", "transactional_spanning", "transactional_batch")]
RETRYING = ["transactional_retry", "transactional_retry_batch"]


@pytest.mark.parametrize("name", [*TRANSACTIONAL, *in_keys("transactional")])
def test_i9_transactional_work_in_the_database_happens_exactly_once(
    nursery: None, audit: str, name: str
) -> None:
    """An effect outside it is repeated if the process died between it and the commit.

    The key of the row is free at once.
    """

    def check(processor: BatchProcessor[Any], left: Left) -> None:
        assert those(lambda row: row.done) == left.settled
        assert work() == Counter(left.settled)
        rest = left.rows - left.settled
        assert_run(processor(), processed=len(rest))
        assert those(lambda row: row.done) == left.rows
        assert work() == Counter(left.rows)
        assert effects() == left.effects + Counter(rest)
        check_order(name)

    kill_at_each(name, audit, check)


@pytest.mark.parametrize("name", RETRYING)
def test_i9_transactional_a_kill_is_no_attempt_and_a_failure_is_one(
    nursery: None, audit: str, name: str
) -> None:
    def check(processor: BatchProcessor[Any], left: Left) -> None:
        attempts = 1 if FIRST in left.settled else 0
        good = left.rows - {FIRST}
        assert those(lambda row: row.done) == left.settled & good
        assert those(lambda row: row.attempts) == left.settled & {FIRST}
        assert work() == Counter(left.settled & good)
        rest = good - left.settled
        assert_run(processor(), processed=len(rest), failed=1, to_retry=1)
        assert those(lambda row: row.done) == good
        assert work() == Counter(good)
        assert effects() == left.effects + Counter({*rest, FIRST})
        failed = rows()[FIRST]
        assert (failed.attempts, failed.dead) == (attempts + 1, False)
        assert failed.last_error == "ValueError: not at home"

    kill_at_each(name, audit, check, fails=FIRST)


# --- AT_MOST_ONCE


@pytest.mark.parametrize("name", ["at_most_once", "at_most_once_batch"])
def test_i9_at_most_once_without_claim_what_was_flipped_is_never_handled_again(
    nursery: None, audit: str, name: str
) -> None:
    def check(processor: BatchProcessor[Any], left: Left) -> None:
        assert those(lambda row: row.done) == left.claimed
        rest = left.rows - left.claimed
        assert_run(processor(), processed=len(rest))
        assert those(lambda row: row.done) == left.rows
        assert effects() == left.effects + Counter(rest)
        assert max(effects().values()) == 1

    kill_at_each(name, audit, check)


def check_doubt(processor: BatchProcessor[Any], left: Left) -> set[int]:
    """Check that what is claimed and not settled is in doubt, and all that is; return it."""
    doubtful = left.claimed - left.settled
    assert those(lambda row: row.claimed) == doubtful
    assert those(lambda row: row.claimed_at) == doubtful
    assert set(processor.in_doubt(older_than=0).values_list("pk", flat=True)) == doubtful
    assert not processor.in_doubt(older_than=60).exists()
    return doubtful


CLAIMING = ["claim", "claim_spanning", "claim_batch", "claim_locking"]


@pytest.mark.parametrize("name", [*CLAIMING, *in_keys("claim")])
def test_i9_at_most_once_what_was_claimed_is_in_doubt_until_a_person_says(
    nursery: None, audit: str, name: str
) -> None:
    """Until then it keeps its place in its key."""

    def check(processor: BatchProcessor[Any], left: Left) -> None:
        assert those(lambda row: row.done) == left.settled
        doubtful = check_doubt(processor, left)
        for _ in range(2):
            waiting = run_beside(processor, name, left, doubtful)
            assert check_doubt(processor, left) == doubtful

        # A person who knows what has happened: each row is done once, and none is left.
        happened = doubtful & left.effects.keys()
        table = processor.pending().model.objects
        some = table.filter(pk__in=happened)
        assert processor.mark_done(some, force=True) == len(happened)
        assert processor.requeue(processor.in_doubt(older_than=0), force=True) == len(
            doubtful - happened
        )
        assert_run(processor(), processed=len(doubtful - happened) + len(waiting))
        assert those(lambda row: row.done and not row.claimed) == left.rows
        assert effects() == Counter(left.rows)
        check_order(name)

    kill_at_each(name, audit, check)


@pytest.mark.parametrize("name", ["claim_retry"])
def test_i9_at_most_once_only_a_failure_that_is_known_is_tried_again(
    nursery: None, audit: str, name: str
) -> None:
    def check(processor: BatchProcessor[Any], left: Left) -> None:
        doubtful = check_doubt(processor, left)
        known = {FIRST} & left.settled
        assert those(lambda row: row.attempts) == known
        rest = left.rows - {FIRST} - left.claimed
        tried = {FIRST} - doubtful
        assert_run(processor(), processed=len(rest), failed=len(tried), to_retry=len(tried))
        assert those(lambda row: row.done) == left.rows - {FIRST} - doubtful
        assert check_doubt(processor, left) == doubtful
        assert effects() == left.effects + Counter(rest | tried)
        assert rows()[FIRST].attempts == len(known) + len(tried)

    kill_at_each(name, audit, check, fails=FIRST)


# --- AT_LEAST_ONCE


LEASING = [
    *("lease", "lease_spanning", "lease_batch", "lease_process_batch"),
    *("lease_saving", "lease_locking"),
]


@pytest.mark.parametrize("name", [*LEASING, *in_keys("lease")])
def test_i9_at_least_once_another_copy_takes_over_when_the_lease_has_lapsed(
    nursery: None, audit: str, name: str
) -> None:
    """Until then it keeps its place in its key."""

    def check(processor: BatchProcessor[Any], left: Left) -> None:
        held = left.claimed - left.settled
        assert those(lambda row: row.done) == left.settled
        assert those(lambda row: row.leased_until) == held
        assert those(lambda row: row.attempts == 1) == held
        waiting = run_beside(processor, name, left, held)
        assert those(lambda row: row.leased_until) == held

        time_passes()
        assert_run(processor(), processed=len(held | waiting))
        assert those(lambda row: row.done and row.leased_until is None) == left.rows
        assert those(lambda row: row.attempts) == set()  # a success clears them
        assert effects() == left.effects + Counter(held | waiting)
        check_order(name)

    kill_at_each(name, audit, check)


def check_mark(processor: BatchProcessor[Any], held: set[int]) -> None:
    """Check that the mark and the lease are in the same rows, and which of them are in progress."""
    assert those(lambda row: row.leased_until) == held
    assert those(lambda row: row.claimed) == held
    assert those(lambda row: row.claimed_at) == held
    assert set(processor.in_progress().values_list("pk", flat=True)) == held


MARKING = [
    *("lease_marked", "lease_marked_batch", "lease_marked_process_batch"),
    *in_keys("lease_marked")[:1],
]


@pytest.mark.parametrize("name", MARKING)
def test_i9_at_least_once_the_mark_that_a_kill_leaves_is_taken_over_with_the_row(
    nursery: None, audit: str, name: str
) -> None:
    def check(processor: BatchProcessor[Any], left: Left) -> None:
        held = left.claimed - left.settled
        check_mark(processor, held)
        waiting = run_beside(processor, name, left, held)
        check_mark(processor, held)

        time_passes()
        assert not processor.in_progress().exists()
        assert_run(processor(), processed=len(held | waiting))
        assert those(lambda row: row.done) == left.rows
        check_mark(processor, set())
        assert effects() == left.effects + Counter(held | waiting)

    kill_at_each(name, audit, check)


@pytest.mark.parametrize("name", ["lease"])
def test_i9_at_least_once_a_kill_is_an_attempt_and_so_is_a_failure(
    nursery: None, audit: str, name: str
) -> None:
    def check(processor: BatchProcessor[Any], left: Left) -> None:
        held = left.claimed - left.settled
        assert those(lambda row: row.attempts == 1) == held | (left.claimed & {FIRST})
        assert those(lambda row: row.leased_until) == held
        time_passes()
        rest = left.rows - {FIRST} - left.settled
        assert_run(processor(), processed=len(rest), failed=1, to_retry=1)
        assert those(lambda row: row.done) == left.rows - {FIRST}
        assert those(lambda row: row.attempts == 2) == left.claimed & {FIRST}
        assert those(lambda row: row.attempts) == {FIRST}
        assert effects() == left.effects + Counter({*rest, FIRST})
        failed = rows()[FIRST]
        assert (failed.dead, failed.leased_until) == (False, None)
        assert failed.last_error == "ValueError: not at home"

    kill_at_each(name, audit, check, fails=FIRST)
