"""What a row has to say after calls that failed, put off, discarded, were lost, or succeeded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcl_processor import Delivery
from tests.fuzz.acting import Call
from tests.fuzz.cases import CLOCK, Case
from tests.fuzz.meeting import MARK
from tests.fuzz.oracle import Columns, Flipped, clocks
from tests.fuzz.troubles import Act

ATTEMPTS, NEXT_ATTEMPT, LAST_ERROR = "attempts", "next_attempt_at", "last_error"
MOST_ATTEMPTS = 2


@dataclass
class Row:
    """One row in the course of its calls."""

    case: Case
    flipped: Flipped
    columns: Columns
    is_open: bool = True
    settled: bool = False
    attempts: int = 0
    #: Whether a time is kept until which it waits, an error, and a claim that was not settled.
    waits: bool = False
    failed: bool = False
    in_doubt: bool = False

    def call(self, call: Call, counts: Counter[str]) -> None:
        """Take a call into account."""
        assert self.is_open, f"row {call.pk} was handed out after it was settled"
        retry = self.case.trouble is not None and self.case.trouble.retry
        attempt = self.attempts + 1 if retry else 0
        if call.lost:
            # Counted by its claim; nothing else is written.
            counts["lease_lost"] += 1
            self.attempts = attempt
            return
        once = self.case.delivery == Delivery.AT_MOST_ONCE
        if call.act == Act.SNOOZE and once and self.case.reset is None:
            counts["failed"] += 1  # nothing can put it back, and nothing says that it is over
            self._stay_claimed()
            return
        act = call.act
        if act == Act.DISCARD and self.case.failed is None:
            act = Act.RAISE
        match act:
            case Act.SUCCEED:
                counts["processed"] += 1
                self._close(self.flipped.columns, 0)
                self.settled, self.waits, self.failed = True, False, False
            case Act.DISCARD:
                counts["discarded"] += 1
                self._give_up(attempt)
            case Act.SNOOZE:
                counts["snoozed"] += 1
                self.waits = retry
            case Act.RAISE:
                counts["failed"] += 1
                self._fail(attempt, retry=retry)

    def _fail(self, attempt: int, *, retry: bool) -> None:
        if retry and attempt < MOST_ATTEMPTS:
            self.attempts, self.waits, self.failed = attempt, True, True
        elif self.case.failed is not None:
            self._give_up(attempt)  # without retry the first failure is the last
        elif self.case.delivery == Delivery.AT_MOST_ONCE:
            self._stay_claimed()

    def _stay_claimed(self) -> None:
        self._close(self.flipped.left_as, 0)
        self.in_doubt = self.case.claim is not None and self.case.timed

    def _give_up(self, attempt: int) -> None:
        assert self.flipped.failed_as is not None
        self._close(self.flipped.failed_as, attempt)
        self.waits, self.failed = False, attempt > 0

    def _close(self, columns: Columns, attempts: int) -> None:
        self.is_open, self.columns, self.attempts = False, columns, attempts

    def expected(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return all columns; of times and errors only whether there are any."""
        expected = dict(self.columns)
        written = self.settled or self.case.delivery != Delivery.TRANSACTIONAL
        if self.case.spare and calls and written:
            expected[self.case.spare] = MARK
        if self.in_doubt:
            expected[CLOCK] = "some"
        if ATTEMPTS in expected:
            expected[ATTEMPTS] = self.attempts
            expected[NEXT_ATTEMPT] = "some" if self.waits else None
            expected[LAST_ERROR] = "some" if self.failed else ""
        return told_roughly(self.case, expected)


def told_roughly(case: Case, columns: Columns) -> dict[str, Any]:
    """Replace what is another one each time."""
    said = dict(columns)
    for name in {CLOCK, NEXT_ATTEMPT, LAST_ERROR, *clocks(case)} & said.keys():
        said[name] = "some" if said[name] else said[name]
    return said


def replay(
    case: Case, flips: Mapping[Any, Flipped], before: Mapping[Any, Columns], calls: Sequence[Call]
) -> tuple[dict[Any, Row], Counter[str]]:
    """Return what the calls made of each row that was pending, and what the reports count."""
    counts: Counter[str] = Counter()
    rows = {pk: Row(case, flipped, before[pk]) for pk, flipped in flips.items()}
    for call in calls:
        assert call.pk in rows, f"row {call.pk} was handed out and is not pending"
        rows[call.pk].call(call, counts)
    return rows, counts
