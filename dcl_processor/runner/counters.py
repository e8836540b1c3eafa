"""Counts and logs outcomes during a run, and makes its report."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dcl_processor.errors import add_note, describe, forget_frames, printable, traceback_text
from dcl_processor.execution.handler import Discarded, Failed, Handled, Lost, Outcome, Snoozed
from dcl_processor.execution.log import log_error
from dcl_processor.report import Failure, Report, Stopped
from dcl_processor.signals import row_finished

from .streak import Streak

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition
    from dcl_processor.execution.failed_elsewhere import FailedElsewhere

logger = logging.getLogger("dcl_processor")

#: The most failures kept in a report, and the most failed rows logged by one run.
MOST_FAILURES = 100

#: Keys that a report names.
MOST_KEYS = 10


@dataclass(slots=True)
class Counters:
    """The counts and failures of a run in progress, for its report."""

    processor: Definition[Any]
    #: Failed rows that end the run, those of other workers of the same run included.
    max_failures: int | None = None
    elsewhere: FailedElsewhere | None = None
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    passes: int = 0
    #: Set during probes, and for good when no row is left to probe.
    probing: bool = False
    started: float = field(default_factory=time.monotonic)
    #: The first keys that were not free.
    held_keys: Sequence[Any] = ()
    #: Rows that were tried, which is what ``limit`` counts.
    handled: int = 0
    streak: Streak = field(init=False)

    def __post_init__(self) -> None:
        self.streak = Streak(self.processor, self.max_failures)

    @property
    def too_many_elsewhere(self) -> bool:
        """Whether the run is to end because of the failures of all its workers."""
        if self.max_failures is None or self.elsewhere is None:
            return False
        return self.elsewhere.failed >= self.max_failures

    @property
    def is_to_be_careful(self) -> bool:
        """Whether the next batch is to have one row, because its flip may turn out to be wrong."""
        seems_wrong = self.streak.wrong > 0 and not self.streak.succeeded
        return self.processor._flip_needs_result and (seems_wrong or not self.handled)

    def fails_too_often(self, so_far: dict[Any, Outcome]) -> bool:
        """Return whether these outcomes, once they are counted, end the run or begin probes.

        ``so_far``: the outcomes of a batch in the order of its rows.
        """
        if not isinstance(next(reversed(so_far.values()), None), Failed | Lost):
            return False
        after = replace(self.streak)
        for each in so_far.values():
            after.note(each)
        to_be_another = after.to_probe > 0 and not self.probing
        return to_be_another or after.ends_the_run

    def count(self, pk: Any, outcome: Outcome) -> None:
        """Add an outcome to the report."""
        self.streak.note(outcome)
        match outcome:
            case Handled():
                self._tell(pk, "processed")
            case Failed():
                self._failed(pk, outcome)
            case Snoozed():
                self._tell(pk, "snoozed")
            case Discarded():
                self._discarded(pk, outcome)
            case Lost(called):
                self.counts["lease_lost"] += 1
                self.handled += called

    def _discarded(self, pk: Any, outcome: Discarded) -> None:
        """Log a row whose handler raised ``Discard``, and count it."""
        why = printable(describe(outcome.error))
        logger.warning("%s: row %s discarded: %s", self.processor.name, printable(str(pk)), why)
        forget_frames(outcome.error)
        self._tell(pk, "discarded")

    def _failed(self, pk: Any, outcome: Failed) -> None:
        """Log a row that failed with its traceback, and count it."""
        self.counts["retried"] += outcome.again_in is not None
        if self.max_failures is not None and self.elsewhere is not None:
            self.elsewhere.count_failure()
        error = outcome.error
        if len(self.failures) < MOST_FAILURES:
            failure = self._failure(pk, outcome)
            self.failures.append(failure)
            name, row = self.processor.name, printable(str(pk))
            log_error(error, "%s: row %s failed%s: %s", name, row, failure.attempts)
        forget_frames(error)
        self._tell(pk, "failed")

    def _failure(self, pk: Any, outcome: Failed) -> Failure:
        return Failure(
            pk,
            outcome.error,
            traceback_text(outcome.error),
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
            name=self.processor.name,
            **self.counts,
            passes=self.passes,
            duration=time.monotonic() - self.started,
            stopped=stopped,
            error=error,
            failures=tuple(self.failures),
            held_keys=self.held_keys,
        )

    def _tell(self, pk: Any, outcome: str) -> None:
        """Count a row, and send the signal."""
        self.counts[outcome] += 1
        self.handled += 1
        sender = type(self.processor)
        row_finished.send_robust(sender, processor=self.processor, pk=pk, outcome=outcome)


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
        logger.error("%s: %d more rows failed and were not logged", report.name, more)
    logger.log(logging.INFO if report.did_something else logging.DEBUG, "%s", report)
