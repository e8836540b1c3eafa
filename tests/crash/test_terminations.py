"""I9: the database ends the session at any statement, and the process lives on.

As for a killed process, each processor runs once undisturbed, and every boundary that it passes
is noted; then its session is ended at each of them. The run connects anew, and another copy does
what it has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.db import connections

from dcl_processor import Report
from tests.contract.support.sessions import end_session
from tests.crash import processors, trace
from tests.crash.audit import effects
from tests.crash.left import Left, rows_of, tried
from tests.crash.rows import fresh, those, work
from tests.crash.trace import Boundary, Trace

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


#: The statement of the handler, which is its last before the effect.
HANDLERS_OWN = "after INSERT INTO tests_parcel"


def run(name: str, audit: str, at: tuple[int, str] | None = None) -> tuple[Trace, Report]:
    """Run on the alias "other", whose session ends at this boundary."""
    fresh(*rows_of(name))
    Path(audit).write_text("")
    connections["other"].close()
    trace.current = Trace(
        rows_of(name), at, end=lambda: end_session(connections["other"]), using="other"
    )
    try:
        with trace.current.watching():
            report = getattr(processors, name)(using="other")
        return trace.current, report
    finally:
        trace.current = None


@dataclass
class Ended:
    """What had happened when the session ended.

    ``at_hand``: the row whose handler did not notice, and did what cannot be taken back.
    """

    left: Left
    at_hand: Counter[int]

    @classmethod
    def at(cls, name: str, boundaries: Sequence[Boundary], number: int) -> Ended:
        last, coming = boundaries[number], boundaries[number + 1 : number + 2]
        at_hand = Counter(
            pk
            for each in (last, *coming)
            if each.name == "before the effect" and last.name in {each.name, HANDLERS_OWN}
            for pk in each.pks
        )
        return cls(Left.behind(rows_of(name), boundaries[: number + 1]), at_hand)


def end_at_each(name: str, audit: str, check: Callable[[Ended], None]) -> None:
    """End the session at each boundary, and check what had happened until then."""
    run(name, audit)  # the first one of a process tries the flips besides
    boundaries = run(name, audit)[0].boundaries
    for at in tried(boundaries, f"session ended, {name}"):
        number = at[0]
        if number == 0:
            continue  # no session is there yet
        _, report = run(name, audit, at)
        try:
            check(Ended.at(name, boundaries, number))
        except AssertionError as error:
            error.add_note(f"ended at {number} of {len(boundaries)}: {at[1]}; {report}")
            raise


TRANSACTIONAL = [
    *("transactional", "transactional_spanning", "transactional_batch"),
    "transactional_in_order",
]
OUTSIDE = [
    *("at_most_once", "at_most_once_batch", "claim", "claim_spanning", "claim_batch"),
    *("lease", "lease_spanning", "lease_batch"),
    *("lease_process_batch", "lease_saving"),
    *("claim_in_order", "lease_in_order", "lease_marked_by_key"),
]


@pytest.mark.parametrize("name", TRANSACTIONAL)
def test_i9_transactional_only_what_was_not_committed_is_done_again(audit: str, name: str) -> None:
    def check(ended: Ended) -> None:
        left = ended.left
        assert work() == Counter(those(lambda row: row.done))
        getattr(processors, name)()
        assert those(lambda row: row.done) == left.rows
        assert work() == Counter(left.rows)
        lost = left.effects - Counter(left.settled) + ended.at_hand
        assert effects() == Counter(left.rows) + lost

    end_at_each(name, audit, check)


@pytest.mark.parametrize("name", OUTSIDE)
def test_i9_outside_a_transaction_nothing_is_lost_with_the_session(audit: str, name: str) -> None:
    """A claim that was not committed is made again; one that was is settled by a new session."""

    def check(ended: Ended) -> None:
        getattr(processors, name)()
        assert effects() == Counter(ended.left.rows)
        assert those(lambda row: row.done) == ended.left.rows
        assert those(lambda row: row.claimed or row.claimed_at or row.leased_until) == set()

    end_at_each(name, audit, check)
