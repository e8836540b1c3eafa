"""Counts and logs outcomes during a run, and makes its report."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import suppress
from typing import Any

from dcl_processor.options.options import Definition
from dcl_processor.pending import steady as time
from dcl_processor.report.errors import add_note, forget_frames, traceback_text
from dcl_processor.report.log import log
from dcl_processor.report.observer import Observers
from dcl_processor.report.outcomes import Discarded, Failed, Handled, Lost, Outcome
from dcl_processor.report.report import TRIED, Failure, Report, Stopped

#: The most failures kept in a report, and the most failed rows logged by one run.
MOST_FAILURES = 100

#: Failures that end a run in which nothing succeeds, unless the processor sets its own number.
MOST_FROM_THE_START = 50


class Counters:
    """The counts and failures of a run in progress, for its report.

    ``handled``: rows that were tried, which is what ``limit`` counts. ``succeeded``: whether any
    row did; ``in_a_row``: failures since then; ``refusals``: rows of these that were handled, and
    whose flip could not be written. ``is_to_move``: bad rows at the head keep the others out, so
    that the run goes on elsewhere.
    """

    def __init__(self, processor: Definition[Any], observers: Observers) -> None:
        self._processor, self._name, self._observers = processor, processor.name, observers
        self.counts: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.passes = self.handled = self.in_a_row = self.refusals = 0
        self.started = time.monotonic()
        self.succeeded = self.is_to_move = self.has_moved = False
        #: Whether the run is to end, because the next row would fail like those before.
        self.fails_too_often = False

    def count(self, pk: Any, outcome: Outcome) -> None:
        """Add an outcome to the report, and tell the observers."""
        self.counts[outcome.name] += 1
        self.handled += outcome.called
        if type(outcome) is Handled:
            self.succeeded, self.fails_too_often = True, False
            self.in_a_row = self.refusals = 0
        elif isinstance(outcome, Failed):
            self._failed(pk, outcome)
        elif isinstance(outcome, Lost):
            self.in_a_row += outcome.called
            self.fails_too_often = self.is_too_many(self.in_a_row)
        else:
            self.succeeded = True
        if isinstance(outcome, Discarded):
            about = (self._name, str(pk), outcome.error)
            known = {"pk": pk, "outcome": outcome.name, "duration": outcome.duration}
            log(logging.WARNING, "%s: row %s discarded: %s", *about, **known)
            forget_frames(outcome.error)
        if self._observers.of_rows:
            self._tell(pk, outcome)

    def _failed(self, pk: Any, outcome: Failed) -> None:
        self.in_a_row += 1
        # Every row may be refused: after the first the next is tried alone, and elsewhere.
        self.refusals += outcome.is_refused
        if self.refusals or self.looks_bad(self.in_a_row):
            self.is_to_move = not (self.succeeded or self.has_moved)
        self.fails_too_often = self.refusals > 1 or self.is_too_many(self.in_a_row)
        self.counts["to_retry"] += outcome.again_in is not None
        if len(self.failures) < MOST_FAILURES:
            error, text = outcome.error, traceback_text(outcome.error)
            numbers = (outcome.attempt, outcome.max_attempts, outcome.again_in)
            failure = Failure(pk, error, text, *numbers)
            self.failures.append(failure)
            about = (self._name, str(pk), failure.attempts, error)
            known = {"pk": pk, "outcome": "failed", "duration": outcome.duration}
            known["attempt"] = outcome.attempt
            message = "%s: row %s failed%s: %s"
            log(logging.ERROR, message, *about, error=error, text=text, **known)
        forget_frames(outcome.error)

    def _tell(self, pk: Any, outcome: Outcome) -> None:
        self._observers.row(
            "ended",
            pk,
            attempt=getattr(outcome, "attempt", None),
            outcome=outcome.name,
            duration=outcome.duration,
            error=getattr(outcome, "error", None),
            is_retried=getattr(outcome, "again_in", None) is not None,
        )

    @property
    def _most(self) -> float:
        most = self._processor.max_consecutive_failures
        if most is None and not self.succeeded:
            return MOST_FROM_THE_START
        return most or math.inf

    def looks_bad(self, in_a_row: int) -> bool:
        """Return whether so many failures at the head let the run go on elsewhere."""
        return in_a_row >= self._most / 2 and not (self.succeeded or self.has_moved)

    def is_too_many(self, in_a_row: int) -> bool:
        """Return whether so many failures in a row end the run."""
        return in_a_row >= self._most

    def report(self, stopped: Stopped, error: BaseException | None) -> Report:
        """Return the report so far; ``error``: why the resource could not be opened."""
        counts: dict[str, Any] = {**self.counts}
        return Report(
            name=self._name,
            **counts,
            passes=self.passes,
            duration=time.monotonic() - self.started,
            stopped=stopped,
            error=error,
            failures=tuple(self.failures),
        )


def attach_report(error: BaseException, report: Report) -> None:
    """Attach the report to the error that ended the run; what the run did until then stays done."""
    with suppress(Exception):  # a class without room for it
        error.report = report  # type: ignore[attr-defined]  # as documented at run()
    if report.did_something:
        add_note(error, f"Until then: {report}")


def log_end(report: Report) -> None:
    """Log a finished run: INFO when it did something, DEBUG when there was nothing to do."""
    if report.failed > MOST_FAILURES:
        more = report.failed - MOST_FAILURES
        message = "%s: %d more rows failed and were not logged"
        log(logging.ERROR, message, report.name, more, outcome="failed", row_count=more)
    level = logging.INFO if report.did_something else logging.DEBUG
    rows = sum([getattr(report, each) for each in TRIED])
    log(level, "%s", report, row_count=rows, duration=report.duration)
