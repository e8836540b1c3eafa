"""I9: what a process killed at any statement of a hand-out leaves, and who gets the rows then.

The process reserves two of three rows and settles each from its token. It is killed at each of the
boundaries that it passes undisturbed, as in ``test_statements.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcl_processor import BatchProcessor
from dcl_processor.contrib.reservations import Reservation
from tests.crash import left as behind
from tests.crash import processors, victims
from tests.crash.audit import effects
from tests.crash.left import Left
from tests.crash.rows import FIRST, ROWS, SECOND, fresh, rows, state, those, time_passes

pytestmark = pytest.mark.django_db(transaction=True)

Check = Callable[[BatchProcessor[Any], Left], None]


def reserve_and_settle(processor: BatchProcessor[Any]) -> list[int]:
    """Have two rows handed out, and settle them as another process would."""
    handed = processor.reserve(2)
    settle(processor, handed)
    return [each.row.pk for each in handed]


def settle(processor: BatchProcessor[Any], handed: list[Reservation[Any]]) -> None:
    for each in handed:
        processors.act(each.row)
        processor.reservation(each.token).settle()


def kill_at_each(name: str, audit: str, check: Check) -> None:
    """Kill the process at each of its boundaries, and check what is left."""
    processor, all_rows = getattr(processors, name), frozenset(ROWS)
    fresh(*ROWS, of=processor)
    Path(audit).write_text("")
    code, boundaries, handed = victims.run(name, audit, all_rows, act=reserve_and_settle)
    assert (code, handed) == (0, [FIRST, SECOND])
    assert effects() == Counter(handed)
    assert those(lambda row: row.done) == set(handed)
    assert any(each.commits for each in boundaries)

    def check_done(processor: BatchProcessor[Any], left: Left) -> None:
        assert those(lambda row: row.done) == left.settled
        check(processor, left)

    behind.kill_at_each(
        name, audit, boundaries, check_done, all_rows=all_rows, act=reserve_and_settle
    )


def reserve_the_rest(processor: BatchProcessor[Any], left: Left) -> None:
    """Check that the rows that were not handed out are, and settle them."""
    handed = processor.reserve(10)
    assert {each.row.pk for each in handed} == left.rows - left.claimed
    settle(processor, handed)


@pytest.mark.parametrize("name", ["lease", "lease_spanning", "lease_marked"])
def test_i9_at_least_once_the_rows_are_handed_out_again_when_the_lease_has_lapsed(
    nursery: None, audit: str, name: str
) -> None:
    """The kill has cost an attempt, also if no agent has ever got the row."""

    def check(processor: BatchProcessor[Any], left: Left) -> None:
        held = left.claimed - left.settled
        marked = {"leased", "marked"}
        assert {pk for pk, row in rows().items() if state(row) in marked} == held
        assert those(lambda row: row.attempts == 1) == held
        reserve_the_rest(processor, left)
        assert those(lambda row: row.done) == left.rows - held

        time_passes()
        handed = processor.reserve(10)
        assert {each.row.pk for each in handed} == held
        assert those(lambda row: row.attempts == 2) == held
        settle(processor, handed)
        assert those(lambda row: state(row) == "done") == left.rows
        assert effects() == left.effects + Counter(left.rows - left.settled)
        assert processor.reserve() == []

    kill_at_each(name, audit, check)


@pytest.mark.parametrize("name", ["claim", "claim_two_tables"])
def test_i9_at_most_once_the_rows_are_in_doubt_until_a_person_decides(
    nursery: None, audit: str, name: str
) -> None:
    def check(processor: BatchProcessor[Any], left: Left) -> None:
        doubtful = left.claimed - left.settled
        assert set(processor.in_doubt(older_than=0).values_list("pk", flat=True)) == doubtful
        reserve_the_rest(processor, left)
        assert those(lambda row: state(row) == "in doubt") == doubtful
        assert max(effects().values()) == 1

        happened = doubtful & left.effects.keys()
        table = processor.pending().model.objects
        assert processor.mark_done(table.filter(pk__in=happened)) == len(happened)
        assert processor.requeue(processor.in_doubt(older_than=0), force=True) == len(
            doubtful - happened
        )
        settle(processor, processor.reserve(10))
        assert those(lambda row: state(row) == "done") == left.rows
        assert effects() == Counter(left.rows)

    kill_at_each(name, audit, check)
