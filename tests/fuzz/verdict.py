"""Whether what two copies made of an example is right; the only place that says what that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from django.db import connections
from django.test.utils import CaptureQueriesContext

from dcl_processor.candidates import windows
from dcl_processor.exceptions import ProcessorError, StillPending
from dcl_processor.report import COUNTS
from tests.fuzz import oracle
from tests.fuzz.cases import RACE, STRANGER, Case
from tests.fuzz.meeting import MARK, Met, meet, processor
from tests.fuzz.worlds import empty

#: What an example came to: not a queryset at all, refused by name, nothing pending, or handled.
NO_QUESTION, REFUSED, NOTHING, ACCEPTED = "no question", "refused", "nothing pending", "accepted"


def judge(case: Case) -> str:
    """Play an example; raise AssertionError unless it is refused by name or goes right."""
    empty()
    case.make_rows()
    before = oracle.everything(case)
    try:
        pending = oracle.pending(case)
    except oracle.NotAskedError:
        return NO_QUESTION
    if not pending and case.meeting != RACE:
        return NOTHING
    flips = {pk: oracle.flipped(case, pk, before[pk]) for pk in pending if pk is not None}
    met = meet(case)
    assert not met.wrong, met.wrong
    after = oracle.everything(case)
    leaving = {pk for pk, each in flips.items() if each.leaves}
    if met.refusals:
        _check_refusal(met, before, after, leaving)
        return REFUSED
    _check_reports(met, possible=all(each.possible for each in flips.values()))
    staying = pending - leaving
    if case.meeting == STRANGER:
        _check_after_the_stranger(case, met, pending, after, before)
        return ACCEPTED
    _check_once(met, pending, leaving)
    for pk, columns in after.items():
        right = flips[pk].columns if pk in leaving else before[pk]
        _check_columns(case, pk, columns, right, is_handled=pk in leaving)
    if not staying:
        _check_empty(case)
    return ACCEPTED if pending else NOTHING


def _check_refusal(met: Met, before: Any, after: Any, leaving: set[Any]) -> None:
    """Before a refusal nothing is written, but for rows that another copy took out rightly."""
    for error in met.refusals:
        assert isinstance(error, ProcessorError)
        assert str(error)
    counts = Counter(met.handled)
    if all(not isinstance(error, StillPending) for error in met.refusals):
        assert not met.handled, met.refusals
    assert all(count <= 1 for pk, count in counts.items() if pk in leaving), counts
    changed = {pk for pk in before if before[pk] != after[pk]}
    assert changed <= leaving & set(met.handled), (changed, leaving, met.handled)


def _check_reports(met: Met, *, possible: bool) -> None:
    """I6: both runs ended, and each row that was handed out is in one count.

    ``possible``: whether the database takes every flip; one that it does not is its row's failure.
    """
    for report in met.reports:
        assert report.stopped in {"drained", "failures"}, report
        assert report.skipped == 0, report
    counted = sum(report.processed + report.failed for report in met.reports)
    assert counted == len(met.handled) or not possible, (met.reports, met.handled)
    for report in met.reports:
        assert all(getattr(report, name) >= 0 for name in COUNTS)
        assert report.failed >= len(report.failures)
        # A row fails for one reason only here: its flip leaves it pending, or cannot be written.
        allowed = (ProcessorError,) if possible else (ProcessorError, *oracle.ERRORS)
        assert all(isinstance(each.error, allowed) for each in report.failures), report.failures


def _check_once(met: Met, pending: set[Any], leaving: set[Any]) -> None:
    """I2: a row that leaves is handled once; what stays never commits, and once per copy."""
    counts = Counter(met.handled)
    assert {*counts} <= pending, (counts, pending)
    stopped = any(report.stopped == "failures" for report in met.reports)
    assert stopped or leaving <= {*counts}, (counts, leaving)
    assert all(counts[pk] <= 1 for pk in leaving), counts
    assert all(counts[pk] <= 2 for pk in pending - leaving), counts
    processed = sum(report.processed for report in met.reports)
    assert processed == len(leaving & {*counts}), (met.reports, leaving)


def _check_after_the_stranger(
    case: Case, met: Met, was: set[Any], after: Mapping[Any, Any], before: Mapping[Any, Any]
) -> None:
    """I2: each row at most once; what the handlers saw was checked by themselves."""
    counts = Counter(met.handled)
    assert all(count == 1 for count in counts.values()), counts
    changed = {pk for pk in before if before[pk] != after[pk]}
    assert changed <= {*counts}, (changed, counts)


def _check_columns(
    case: Case, pk: Any, is_: Mapping[str, Any], right: Mapping[str, Any], *, is_handled: bool
) -> None:
    """I11: the flip's columns are written, and no others."""
    expected = dict(right)
    if is_handled and case.spare:
        expected[case.spare] = MARK
    for name in oracle.clocks(case) if is_handled else ():
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


def narrow_windows(patch: Any) -> None:
    """Make the windows so small that a few rows are several."""
    patch.setattr(windows, "WINDOW", 2)
    patch.setattr(windows, "WIDE_WINDOW", 3)
