"""Counts and logs outcomes during a run, and makes its report."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dcl_processor import observers
from dcl_processor import steady as time
from dcl_processor.errors import add_note, forget_frames, represent, traceback_text
from dcl_processor.execution.handler import Discarded, Failed, Handled, Lost, Outcome, Snoozed
from dcl_processor.log_fields import error_fields, fields, log
from dcl_processor.masking import shown
from dcl_processor.report import TRIED, Failure, Report, Stopped
from dcl_processor.signals import row_finished

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

logger = logging.getLogger("dcl_processor")

#: The most failures kept in a report, and the most failed rows logged by one run.
MOST_FAILURES = 100

#: Keys that a report names.
MOST_KEYS = 10


@dataclass(slots=True)
class Counters:
    """The counts and failures of a run in progress, for its report."""

    processor: Definition[Any]
    #: Whether the flip needs the handler's result, or a trial of it was refused.
    may_be_refused: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    passes: int = 0
    started: float = field(default_factory=time.monotonic)
    #: The first keys that were not free.
    held_keys: Sequence[Any] = ()
    #: Rows that were tried, which is what ``limit`` counts.
    handled: int = 0
    streak: Streak = field(init=False)
    _name: str = field(init=False)

    def __post_init__(self) -> None:
        self.streak, self._name = Streak(self.processor), self.processor.name

    @property
    def is_to_be_careful(self) -> bool:
        """Whether to take one row at a time: its flip is known to be right once it is written."""
        return self.streak.wrong > 0 or (self.may_be_refused and not self.handled)

    def fails_too_often(self, so_far: dict[Any, Outcome]) -> bool:
        """Return whether these outcomes, once they are counted, end the run, or let it move.

        ``so_far``: the outcomes of a batch in the order of its rows.
        """
        if not isinstance(next(reversed(so_far.values()), None), Failed | Lost):
            return False
        after = replace(self.streak)
        for each in so_far.values():
            after.note(each)
        return after.is_to_move or after.ends_the_run

    def count(self, pk: Any, outcome: Outcome) -> None:
        """Add an outcome to the report."""
        if not (self.streak.goes_well and type(outcome) is Handled):
            self.streak.note(outcome)
        match outcome:
            case Handled():
                self._tell(pk, "processed", outcome)
            case Failed():
                self._failed(pk, outcome)
            case Snoozed():
                self._tell(pk, "snoozed", outcome)
            case Discarded():
                self._discarded(pk, outcome)
            case Lost():
                self._lost(outcome)

    def _lost(self, outcome: Lost) -> None:
        self.counts["lease_lost"] += 1
        self.handled += outcome.called
        if observers.active:
            observers.tell("row_ended", self._name, "lease_lost", is_retried=False)

    def _discarded(self, pk: Any, outcome: Discarded) -> None:
        """Log a row whose handler raised ``Discard``, and count it."""
        name, error = self._name, outcome.error
        extra = fields(
            name, pk=pk, outcome="discarded", duration=outcome.duration, **error_fields(error)
        )
        message = "%s: row %s discarded: %s"
        log(logger, logging.WARNING, message, name, str(pk), error, extra=extra)
        forget_frames(outcome.error)
        self._tell(pk, "discarded", outcome)

    def _failed(self, pk: Any, outcome: Failed) -> None:
        """Log a row that failed with its traceback, and count it."""
        self.counts["to_retry"] += outcome.again_in is not None
        error = outcome.error
        if len(self.failures) < MOST_FAILURES:
            # Once for the report and the log: to format it costs more than the rest of a row.
            text = traceback_text(error)
            failure = self._failure(pk, outcome, text)
            self.failures.append(failure)
            name, words = self._name, "%s: row %s failed%s: %s"
            known = {"attempt": outcome.attempt, "duration": outcome.duration}
            extra = fields(name, pk=pk, outcome="failed", **known)
            about: tuple[Any, ...] = (name, str(pk), failure.attempts, error)
            if outcome.result is not None:
                # What was bought, for instance, and is recorded in no row.
                words += "; its handler had returned %s"
                about += (shown(represent(outcome.result)),)
            log(logger, logging.ERROR, words, *about, extra=extra, exc_info=error, traceback=text)
        forget_frames(error)
        self._tell(pk, "failed", outcome)

    def _failure(self, pk: Any, outcome: Failed, text: str) -> Failure:
        return Failure(
            pk,
            outcome.error,
            text,
            attempt=outcome.attempt,
            max_attempts=outcome.max_attempts,
            again_in=outcome.again_in,
        )

    def note_held(self, rows: int, keys: Sequence[Any]) -> None:
        """Record rows that were not tried because their key was not free."""
        self.counts["held"] += rows
        self.held_keys = tuple(keys[:MOST_KEYS])

    def report(self, stopped: Stopped, error: BaseException | None) -> Report:
        """Return the report so far; ``error``: why the resource could not be opened."""
        return Report(
            name=self._name,
            **self.counts,
            passes=self.passes,
            duration=time.monotonic() - self.started,
            stopped=stopped,
            error=error,
            failures=tuple(self.failures),
            held_keys=self.held_keys,
        )

    def _tell(self, pk: Any, outcome: str, ended: Handled | Failed | Snoozed | Discarded) -> None:
        """Count a row, and send the signal."""
        self.counts[outcome] += 1
        self.handled += 1
        attempt = again_in = None
        if isinstance(ended, Failed):
            attempt, again_in = ended.attempt, ended.again_in
        if observers.active:
            is_retried = again_in is not None
            observers.tell("row_ended", self._name, outcome, is_retried=is_retried)
        if not row_finished.receivers:
            return
        row_finished.send_robust(
            type(self.processor),
            processor=self.processor,
            pk=pk,
            outcome=outcome,
            attempt=attempt,
            duration=ended.duration,
        )


def attach_report(error: BaseException | None, report: Report) -> None:
    """Attach the report to the error that ended the run; what the run did until then stays done."""
    if error is not None:
        with suppress(Exception):  # a class without room for it
            error.report = report  # type: ignore[attr-defined]  # as documented at run()
        if report.did_something:
            add_note(error, f"Until then: {report}")


def log_end(report: Report) -> None:
    """Log a finished run: INFO when it did something, DEBUG when there was nothing to do."""
    if report.failed > MOST_FAILURES:
        more = report.failed - MOST_FAILURES
        message = "%s: %d more rows failed and were not logged"
        extra = fields(report.name, outcome="failed", row_count=more)
        log(logger, logging.ERROR, message, report.name, more, extra=extra)
    level = logging.INFO if report.did_something else logging.DEBUG
    if logger.isEnabledFor(level):
        rows = sum(getattr(report, each) for each in TRIED)
        extra = fields(report.name, row_count=rows, duration=report.duration)
        log(logger, level, "%s", report, extra=extra)


#: Failures that end a run in which nothing succeeds, unless the processor sets its own number.
MOST_FROM_THE_START = 50


@dataclass(slots=True)
class Streak:
    """The failures since a row was processed, and whether any row of the run succeeded.

    Rows at the head that always fail must not keep every run from trying the others. So a run in
    which nothing succeeded goes on from a random place before it ends.
    """

    processor: Definition[Any]
    failed: int = 0
    #: Rows since then whose flip was refused, or left them pending.
    wrong: int = 0
    succeeded: bool = False
    #: Whether rows succeed, and the last ones did: one more success changes nothing.
    goes_well: bool = False
    #: Whether the run is to end, because the next row would fail like those before.
    ends_the_run: bool = False
    #: Whether to go on from a random place before the failures end the run.
    is_to_move: bool = False
    #: Whether that was done; without a refused flip it is once in a run.
    has_moved: bool = False

    def note(self, outcome: Outcome) -> None:
        """Take one more outcome into account."""
        is_wrong = False
        match outcome:
            case Handled():
                self.succeeded, self.failed, self.wrong, self.goes_well = True, 0, 0, True
                self.ends_the_run = self.is_to_move = False
                return
            case Snoozed() | Discarded():
                self.succeeded = True
            case Failed():
                self.failed += 1
                is_wrong = outcome.refused
                self.wrong += is_wrong
            case Lost(called=True):
                self.failed += 1
        self.goes_well = self.succeeded and not self.failed
        # One such row is a failure of that row. At the second in a row the run has to end, because
        # this run and every later one would repeat each further handler call.
        self.ends_the_run = self.wrong >= 2 or self.failed >= self._most
        # Keys are visited from a random place.
        if self.processor.group_by is not None:
            return
        if is_wrong:
            self.is_to_move = True
        elif not (self.succeeded or self.has_moved):
            self.is_to_move = self.failed >= self._most / 2

    @property
    def _most(self) -> float:
        most = self.processor.max_consecutive_failures
        if most is None and not self.succeeded:
            return MOST_FROM_THE_START
        return most or math.inf
