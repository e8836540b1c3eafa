"""What must hold in every schedule: I2 of each delivery, and that a run ends with all rows done.

As many handlers as rows, since nothing dies here and no lease lapses but where time passes: there
a second handler is allowed for each lease that was lost, and one settlement all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dcl_processor import Report

from .actors import Actor
from .control import Control
from .schedule import Violation
from .steps import Step
from .subjects import Subject


class Audit:
    """Watches one schedule."""

    def __init__(self, subject: Subject, rows: Sequence[int], control: Control) -> None:
        self._subject, self._rows, self._control = subject, set(rows), control
        self._done: set[int] = set()
        self.handled: Counter[int] = Counter()
        #: Leases that lapsed while they were held: each allows one more handler.
        self._lapsed: Counter[int] = Counter()
        self._time_has_passed = False

    def after(self, actor: Actor, step: Step) -> None:
        """Look at each handler and each commit, as soon as it was there."""
        if "handler" in step.writes:
            [row] = step.rows
            self.handled[row] += 1
            # A copy that stood still for a whole lease, between its last look at it and its
            # handler, has no way to know.
            if row in self._done and not self._lapsed[row]:
                raise Violation(f"row {row % 10} was handled after its flip was committed")
        if "time" in step.writes:
            self._time_has_passed = True
            leased = self._control.ask("SELECT id FROM tests_errand WHERE leased_until IS NOT NULL")
            self._lapsed.update(row for [row] in leased)
        if "data" in step.writes:
            self._look(actor, step)

    def _look(self, actor: Actor, step: Step) -> None:
        done = {row for [row] in self._control.ask(self._subject.ask_done)}
        for row in done - self._done:
            if not self.handled[row]:
                raise Violation(f"{actor.name} flipped row {row % 10} without a handler at: {step}")
        if self._done - done:
            raise Violation(f"{actor.name} took a committed flip back at: {step}")
        self._done = done

    def at_the_end(self, reports: Sequence[Report]) -> set[int]:
        """Judge what the copies did; return the rows that they skipped."""
        left = self._rows - self._done
        if twice := {row % 10 for row in self.handled if self.handled[row] > 1 + self._lapsed[row]}:
            raise Violation(f"two handlers of row {twice}")
        lost = sum(report.lease_lost for report in reports)
        for report in reports:
            # One may be given back untouched, too: if its claim took as long as a lease.
            if report.failures or report.failed or (lost and not self._time_has_passed):
                raise Violation(f"a copy failed: {report}") from (
                    report.failures[0].error if report.failures else None
                )
        processed = sum(report.processed for report in reports)
        if processed != len(self._done) or set(self.handled) < self._done:
            raise Violation(f"{processed} rows were reported as processed, of {self._done} done")
        if self.handled.total() > processed + lost:
            raise Violation(f"{self.handled.total()} handlers, {processed} processed, {lost} lost")
        # Whoever leaves a row behind says so.
        if left and not lost and not any(report.skipped for report in reports):
            raise Violation(f"rows {left} are pending, and no copy has reported them as skipped")
        return left

    def after_a_last_run(self, left: set[int], report: Report) -> None:
        """See that what was skipped is done by a lone copy."""
        done = {row for [row] in self._control.ask(self._subject.ask_done)}
        if done != self._rows or report.processed != len(left):
            raise Violation(f"rows {self._rows - done} are left after a last run: {report}")
