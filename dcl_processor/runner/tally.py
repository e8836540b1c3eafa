"""Counts outcomes while a run goes on, tells the log about them, and makes the report."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dcl_processor.errors import describe, forget_frames, traceback_text
from dcl_processor.exceptions import InvalidDone, StillPending
from dcl_processor.execution.handler import Discarded, Failed, Handled, Lost, Outcome, Snoozed
from dcl_processor.execution.log import log_error
from dcl_processor.locking.claiming import Miss
from dcl_processor.report import COUNTS, Failure, Report, Stopped
from dcl_processor.signals import row_finished

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

logger = logging.getLogger("dcl_processor")

#: Failures kept in a report, and failed rows logged by one run.
MOST_FAILURES = 100


@dataclass(slots=True)
class Tally:
    """The report in the making."""

    processor: Definition[Any]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    passes: int = 0
    wrong: int = 0
    failed_in_a_row: int = 0
    started: float = field(default_factory=time.monotonic)
    #: Rows that were tried, which is what ``limit`` counts.
    handled: int = 0

    @property
    def processor_is_wrong(self) -> bool:
        """Whether the rows that were handled stay pending, all of them: it is not the rows then.

        One such row is its own failure; at the second the run has to end, since each further
        handler call would be repeated by every run to come.
        """
        return self.wrong >= 2 and not self.counts["processed"]

    @property
    def too_many_failures(self) -> bool:
        """Whether so many rows failed one after the other that the next would, too."""
        most = self.processor.max_consecutive_failures
        return most is not None and self.failed_in_a_row >= most

    def would_be_in_vain(self, so_far: dict[Any, Any]) -> bool:
        """Tell whether, after these outcomes as well, the next row would fail like those before.

        ``so_far``: the outcomes of a batch in the order of its rows, which are counted later.
        """
        last = next(reversed(so_far.values()), None)
        if not isinstance(last, Failed):
            return False
        return (_is_wrong(last) and self._all_wrong(so_far)) or self._failing_on(so_far)

    def _all_wrong(self, so_far: dict[Any, Any]) -> bool:
        wrong = sum(isinstance(each, Failed) and _is_wrong(each) for each in so_far.values())
        handled = any(isinstance(each, Handled) for each in so_far.values())
        return self.wrong + wrong >= 2 and not handled and not self.counts["processed"]

    def _failing_on(self, so_far: dict[Any, Any]) -> bool:
        most = self.processor.max_consecutive_failures
        if most is None:
            return False
        streak = 0
        for each in reversed(so_far.values()):
            streak += isinstance(each, Failed)
            if streak >= most or isinstance(each, Handled):
                return streak >= most
        return self.failed_in_a_row + streak >= most

    def count(self, pk: Any, outcome: Outcome | Miss) -> None:
        """Put an outcome into the report; of a row that was missed it is not known yet."""
        match outcome:
            case Handled():
                self.processed(pk)
            case Failed():
                self.failed(pk, outcome)
            case Snoozed():
                self.snoozed(pk)
            case Discarded():
                self.discarded(pk, outcome)
            case Lost():
                self.counts["lease_lost"] += 1
            case Miss.STALE:
                self.counts["stale"] += 1

    def processed(self, pk: Any) -> None:
        """Count a row that was settled."""
        self.counts["processed"] += 1
        self.failed_in_a_row = 0
        self._tell(pk, "processed")

    def snoozed(self, pk: Any) -> None:
        """Count a row whose handler said "not now"."""
        self.counts["snoozed"] += 1
        self._tell(pk, "snoozed")

    def discarded(self, pk: Any, outcome: Discarded) -> None:
        """Count a row whose handler said "never", and say so in the log."""
        self.counts["discarded"] += 1
        logger.warning("%s: row %s discarded: %s", self.processor.name, pk, describe(outcome.error))
        forget_frames(outcome.error)
        self._tell(pk, "discarded")

    def failed(self, pk: Any, outcome: Failed) -> None:
        """Count a row that failed, and log it with its traceback."""
        self.counts["failed"] += 1
        self.failed_in_a_row += 1
        error = outcome.error
        self.wrong += _is_wrong(outcome)
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(Failure(pk, error, traceback_text(error)))
            log_error(error, "%s: row %s failed: %s", self.processor.name, pk)
        forget_frames(error)
        self._tell(pk, "failed")

    def report(self, stopped: Stopped, error: BaseException | None) -> Report:
        """Return the report so far; ``error``: why the resource could not be opened."""
        return Report(
            name=self.processor.name,
            **self.counts,
            passes=self.passes,
            duration=time.monotonic() - self.started,
            stopped=stopped,
            error=error,
            failures=tuple(self.failures),
        )

    def _tell(self, pk: Any, outcome: str) -> None:
        self.handled += 1
        sender = type(self.processor)
        row_finished.send_robust(sender, processor=self.processor, pk=pk, outcome=outcome)


def _is_wrong(outcome: Failed) -> bool:
    # Raised by the handler itself, it may be another processor's.
    return outcome.handled and isinstance(outcome.error, StillPending | InvalidDone)


def log_end(report: Report) -> None:
    """Log a finished run: INFO when it did something, DEBUG when there was nothing to do."""
    if report.failed > MOST_FAILURES:
        more = report.failed - MOST_FAILURES
        logger.error("%s: %d more rows failed and were not logged", report.name, more)
    did = any(getattr(report, name) for name in COUNTS if name != "stale")
    logger.log(logging.INFO if did else logging.DEBUG, "%s", report)
