"""Whether what two workers made of an example is right; the only place that says what that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from dcl_processor import Delivery
from dcl_processor.exceptions import ProcessorError, StillPending
from dcl_processor.pending import scan
from dcl_processor.report.report import COUNTS
from tests.fuzz import oracle
from tests.fuzz.cases import CLOCK, RACE, STRANGER, Case
from tests.fuzz.meeting import MARK, Met, change_what_is_beside, meet, processor
from tests.fuzz.oracle import Flipped
from tests.fuzz.worlds import empty

#: What an example came to: not a queryset at all, refused by name, nothing pending, or handled.
NO_QUESTION, REFUSED, NOTHING, ACCEPTED = "no question", "refused", "nothing pending", "accepted"

#: The rows of one window: so few that a few rows are several windows.
WINDOW = 2


def judge(case: Case) -> str:
    """Play an example; raise AssertionError unless it is refused by name or goes right."""
    with patch.multiple(scan, WINDOW=WINDOW, WIDE_WINDOW=WINDOW + 1):
        return _judge(case)


def _judge(case: Case) -> str:
    empty()
    case.make_rows()
    before = oracle.everything(case)
    try:
        worlds = Worlds.of(case, before)
    except oracle.NotAskedError:
        return NO_QUESTION
    if not worlds.first and case.meeting != RACE:
        return NOTHING
    met = meet(case, before)
    assert not met.wrong, met.wrong
    after = oracle.everything(case)
    _check_once(case, met, worlds)
    for pk, columns in after.items():
        _check_columns(case, met, pk, columns, before[pk], worlds.of_row(met, pk))
    if met.refusals:
        _check_refusal(met)
        return REFUSED
    _check_reports(met, worlds)
    if case.meeting != STRANGER and all(each.leaves for each in worlds.first.values()):
        _check_empty(case)
    return ACCEPTED if worlds.first else NOTHING


@dataclass(frozen=True)
class Worlds:
    """What the flips make of each pending row, at first and once the stranger has come."""

    first: Mapping[Any, Flipped]
    then: Mapping[Any, Flipped]

    @classmethod
    def of(cls, case: Case, before: Mapping[Any, Any]) -> Worlds:
        first = then = _flips(case, before)
        if case.meeting == STRANGER:
            with transaction.atomic():
                change_what_is_beside("default")
                then = _flips(case, before)
                transaction.set_rollback(True)
        return cls(first, then)

    def of_row(self, met: Met, pk: Any) -> Flipped | None:
        """Return what is right for a row; ``None``: it was not pending when it was looked at."""
        return (self.first if pk in met.early else self.then).get(pk)

    def have_to_leave(self) -> set[Any]:
        """Return the rows that leave, whenever they are come to."""
        return {pk for pk, each in self.first.items() if each.leaves and pk in self.then} & {
            pk for pk, each in self.then.items() if each.leaves
        }


def _flips(case: Case, before: Mapping[Any, Any]) -> dict[Any, Flipped]:
    pending = oracle.pending(case)
    return {pk: oracle.flipped(case, pk, before[pk]) for pk in pending if pk is not None}


def _check_once(case: Case, met: Met, worlds: Worlds) -> None:
    """I2: a row that leaves is handled once; what stays never commits, and once per copy."""
    counts = Counter(met.handled)
    rows = {pk: worlds.of_row(met, pk) for pk in counts}
    workers = 1 if case.meeting == STRANGER else 2
    for pk, each in rows.items():
        assert each is not None, f"row {pk} was handed out and is not pending"
        assert each.may_start, f"row {pk} was handed out, and another copy could claim it again"
        once = each.leaves or case.delivery == Delivery.AT_MOST_ONCE
        assert counts[pk] <= (1 if once else workers), counts
    ended_early = met.refusals or any(each.stopped == "failures" for each in met.reports)
    missed = worlds.have_to_leave() - {*counts}
    assert ended_early or not missed, (counts, missed)
    if not met.refusals:
        processed = sum(report.processed for report in met.reports)
        assert processed == sum(each is not None and each.leaves for each in rows.values())


def _check_refusal(met: Met) -> None:
    """Expect a refusal to say why, and before any handler unless it is about one row."""
    assert all(str(error) for error in met.refusals)
    if not any(
        isinstance(error, StillPending) or "to return each row once" in str(error)
        for error in met.refusals
    ):
        assert not met.handled, met.refusals


def _check_reports(met: Met, worlds: Worlds) -> None:
    """I6: both runs ended, and each row that was handed out is in one count."""
    for report in met.reports:
        assert report.stopped in {"drained", "failures"}, report
        assert (report.skipped, report.lease_lost) == (0, 0), report
    # Whether the database takes every flip; one that it does not is its row's failure.
    flips = [*worlds.first.values(), *worlds.then.values()]
    possible = all(each.possible for each in flips)
    counted = sum(report.processed + report.failed for report in met.reports)
    assert counted == len(met.handled) or not possible, (met.reports, met.handled)
    for report in met.reports:
        assert all(getattr(report, name) >= 0 for name in COUNTS)
        assert report.failed >= len(report.failures)
        # A row fails for one reason only here: its flip leaves it pending, or cannot be written.
        allowed = (ProcessorError,) if possible else (ProcessorError, *oracle.ERRORS)
        assert all(isinstance(each.error, allowed) for each in report.failures), report.failures


def _check_columns(  # one row, as it was, is, and should be
    case: Case, met: Met, pk: Any, is_: Mapping[str, Any], was: Mapping[str, Any], each: Any
) -> None:
    """I11: the flips' columns are written, and no others; what was not kept is taken back."""
    handled = pk in met.handled
    expected = dict(was)
    if handled:
        expected = dict(each.columns if each.leaves else each.left_as)
    if case.spare and handled and (each.leaves or case.delivery != Delivery.TRANSACTIONAL):
        expected[case.spare] = MARK
    times = oracle.clocks(case) if handled and each.leaves else set()
    if case.claim is not None and case.timed and handled and not each.leaves:
        assert is_[CLOCK] is not None, f"row {pk} is in doubt, and nothing says since when"
        times.add(CLOCK)
        expected[CLOCK] = is_[CLOCK]
    for name in times:
        assert (is_[name] is None) == (expected[name] is None)
        expected[name] = is_[name]
    assert is_ == expected, f"row {pk} is {is_}, expected {expected}"


def _check_empty(case: Case) -> None:
    """I1: with nothing pending, a run is one SELECT."""
    met = Met()
    empty_run = processor(case, met)
    using = case.queryset()._db or "default"
    with CaptureQueriesContext(connections[using]) as sent:
        report = empty_run()
    assert (report.processed, report.passes, met.handled) == (0, 1, []), report
    # A question that cannot have an answer is not even sent.
    assert len(sent) <= 1, [query["sql"] for query in sent]
    assert all(query["sql"].lstrip("(").startswith("SELECT") for query in sent)
