"""What became of the workers of one run, each of which may have had a successor: one report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from dcl_processor import steady as time
from dcl_processor.diagnosis import Trouble
from dcl_processor.report import COUNTS, TRIED, Report, Stopped
from dcl_processor.runner.counters import MOST_FAILURES
from dcl_processor.signals import OnRow

from .news import Died, News

if TYPE_CHECKING:
    from dcl_processor.metrics import Samples

logger = logging.getLogger("dcl_processor")

#: Takes what one of several workers has counted since its last message.
OnCounts = Callable[["Samples"], None]


def shares(limit: int | None, workers: int) -> list[int | None]:
    """Divide a limit as evenly as possible."""
    if limit is None:
        return [None] * workers
    each, rest = divmod(limit, workers)
    return [each + (number < rest) for number in range(workers)]


class Outcomes:
    """The outcomes of the workers of one run; ``limits``: the rows that each may still try."""

    def __init__(self, name: str, limits: list[int | None], on_row: OnRow | None) -> None:
        self.limits = limits
        self._name = name
        self._on_row = on_row
        self._outcomes: dict[int, Report | Trouble] = {}
        self._deaths: dict[int, list[Trouble]] = {}

    def tell(self, number: int, _: str | None, event: News) -> None:
        """Take what happened to a worker."""
        match event:
            case str():
                self._count(number)
                if self._on_row is not None:
                    self._on_row(event)
            case Report() | Trouble():
                self._outcomes[number] = event
            case Died() if number not in self._outcomes:
                # A worker that dies after its report has done all of its work.
                self._deaths.setdefault(number, []).append(event.trouble)
                logger.error("%s, worker %d: %s", self._name, number, event.trouble.sentence)

    def in_order(self) -> list[Report | Trouble]:
        """Return one outcome for each worker, by number."""
        numbers = sorted({*self._outcomes, *self._deaths})
        return [self._of(number) for number in numbers]

    def _count(self, number: int) -> None:
        # A worker that takes this one's place has one row less to try.
        if left := self.limits[number - 1]:
            self.limits[number - 1] = left - 1

    def _of(self, number: int) -> Report | Trouble:
        outcome, deaths = self._outcomes.get(number), self._deaths.get(number, [])
        if not deaths:
            assert outcome is not None
            return outcome
        sentences = [trouble.sentence for trouble in deaths]
        report = outcome if isinstance(outcome, Report) else None
        if isinstance(outcome, Trouble):
            sentences.append(outcome.sentence)
            report = outcome.report
        words = "; then ".join(sentences)
        return replace(deaths[-1], sentence=words, report=report, is_logged=True)


def merge(name: str, workers: Sequence[Report | Trouble], limit: int | None) -> Report:
    """Return one report of all workers; a worker that died without a report counts nothing.

    It lets the run end by ``"failures"``, unless something else ended the run. Several workers may
    try a row that fails. It counts once, as long as all failures are kept.
    """
    own = [worker.report if isinstance(worker, Trouble) else worker for worker in workers]
    reports = [report for report in own if report is not None]
    to_retry = sum(report.to_retry for report in reports)
    counts = {count: sum(getattr(report, count) for report in reports) for count in COUNTS}
    # Rows that one worker found held or locked may have been handled by another, until the last one
    # ended; and a row that a session keeps locked was met by each of them.
    last = max(reports, key=lambda report: report.duration, default=None)
    for count in ("held", "skipped"):
        counts[count] = 0 if last is None else getattr(last, count)
    tried = sum(counts[count] for count in TRIED)
    failures = {str(failure.pk): failure for report in reports for failure in report.failures}
    if all(report.failed == len(report.failures) for report in reports):
        counts["failed"] = len(failures)
        to_retry = sum(not failure.is_final for failure in failures.values())
    return Report(
        name=name,
        **counts,
        to_retry=to_retry,
        redone=sum(report.redone for report in reports),
        passes=max((report.passes for report in reports), default=0),
        duration=max((report.duration for report in reports), default=0.0),
        stopped=_stopped(
            {report.stopped for report in reports},
            limit is not None and tried >= limit,
            has_lost_one=None in own,
        ),
        error=next((report.error for report in reports if report.error is not None), None),
        failures=tuple(islice(failures.values(), MOST_FAILURES)),
        held_keys=() if last is None else last.held_keys,
    )


def _stopped(reasons: set[Stopped], reached_limit: bool, *, has_lost_one: bool) -> Stopped:
    # If one worker reached its share of the limit while another worker found no more rows, the run
    # was drained all the same.
    order: tuple[Stopped, ...] = (
        "failures",
        "signal",
        "operator",
        "paused",
        "breaker",
        "timeout",
        "throttled",
    )
    for reason in order:
        if reason in reasons:
            return reason
    if reached_limit:
        return "limit"
    if has_lost_one:
        return "failures"  # what it would have found is not known
    return "busy" if "busy" in reasons and "drained" not in reasons else "drained"


def tell_of_success(
    report: Report, workers: Sequence[Report | Trouble], on_counts: OnCounts | None
) -> None:
    """Report the success of a run that several workers share; each sees only its own rows."""
    if on_counts is None or not all(isinstance(each, Report) for each in workers):
        return
    from dcl_processor.metrics import LAST_SUCCESS, succeeded  # not for others

    if workers and succeeded(report):
        on_counts({(LAST_SUCCESS, (("processor", report.name),)): time.time()})
