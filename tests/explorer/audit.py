"""What must hold in every schedule: I2 of each delivery, and that a run ends with all rows done.

As many handlers as rows, since nothing dies here and no lease lapses but where time passes: there
a second handler is allowed for each lease that was lost, and one settlement all the same. A handler
that ends its transaction has its row fail, and another one is allowed for that; and so it is for a
row that is made pending again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dcl_processor import Report

from .actors import STAGE, Actor
from .control import Control
from .schedule import Violation
from .steps import Step
from .subjects import Subject


class Audit:
    """Watches one schedule."""

    def __init__(self, subject: Subject, rows: Sequence[int], control: Control) -> None:
        self._subject, self._control = subject, control
        self._rows = {row + STAGE * stage for row in rows for stage in range(subject.stages)}
        self._done: set[int] = set()
        self.handled: Counter[int] = Counter()
        #: Leases that lapsed while they were held: each allows one more handler.
        self._lapsed: Counter[int] = Counter()
        self._time_has_passed = False
        #: How often rows were made pending again, which allows one more handler, too.
        self._edited: Counter[int] = Counter()

    def after(self, actor: Actor, step: Step) -> None:
        """Look at each handler and each commit, as soon as it was there."""
        if "handler" in step.writes:
            row = max(step.rows)  # in a second stage
            self.handled[row] += 1
            # A copy that stood still for a whole lease, between its last look at it and its
            # handler, has no way to know.
            if row in self._done and not self._lapsed[row]:
                raise Violation(f"row {row % 10} was handled after its flip was committed")
            self._look_at_order(row)
        if "time" in step.writes:
            self._time_has_passed = True
            leased = self._control.ask(self._subject.ask_leased)
            self._lapsed.update(row for [row] in leased)
        if "data" in step.writes:
            self._look(actor, step)

    def _look_at_order(self, row: int) -> None:
        """See that all rows before it in its key are done, and so none of them is in flight."""
        keys = self._subject.keys
        before = {each for each in self._rows if keys and each % keys == row % keys and each < row}
        if before - self._done:
            raise Violation(f"row {row % 10} was handled before {before - self._done} of its key")

    def _look(self, actor: Actor, step: Step) -> None:
        done = {row for [row] in self._control.ask(self._subject.ask_done)}
        for row in done - self._done:
            if not self.handled[row]:
                raise Violation(f"{actor.name} flipped row {row % 10} without a handler at: {step}")
        # Not by whose step it was: an edit that waits for a lock comes with another one's COMMIT.
        edited = Counter(dict(self._control.ask(self._subject.ask_edited)))
        back = {row for row in self._done - done if edited[row] == self._edited[row]}
        self._edited = edited
        if back:
            raise Violation(f"{actor.name} took a committed flip back at: {step}")
        self._done = done

    def at_the_end(self, reports: Sequence[Report]) -> set[int]:
        """Judge what the copies did; return the rows that they skipped."""
        left = self._rows - self._done
        processed = sum(report.processed for report in reports)
        lost = sum(report.lease_lost for report in reports)
        failed = Counter(failure.pk for report in reports for failure in report.failures)
        more = self._lapsed + failed + self._edited
        allowed = {row: 1 + more[row] for row in self.handled}
        if twice := {row % 10 for row in self.handled if self.handled[row] > allowed[row]}:
            raise Violation(f"two handlers of row {twice}, {processed} processed")
        for report in reports:
            errors = [failure.error for failure in report.failures]
            wrong = [error for error in errors if not isinstance(error, self._subject.fails_by)]
            # One may be given back untouched, too: if its claim took as long as a lease.
            if wrong or report.failed > len(errors) or (lost and not self._time_has_passed):
                raise Violation(f"a copy failed: {report}") from next(iter(wrong), None)
        over = processed - len(self._done)
        if not 0 <= over <= self._edited.total() or set(self.handled) < self._done:
            raise Violation(f"{processed} rows were reported as processed, of {self._done} done")
        if self.handled.total() > processed + lost + failed.total():
            raise Violation(f"{self.handled.total()} handlers, {processed} processed, {lost} lost")
        # Whoever leaves a row behind says so.
        comes_later = self._edited or self._subject.stages > 1
        told = any(report.skipped or report.held for report in reports)
        is_known = lost or failed or comes_later or told
        if left and not is_known:
            raise Violation(f"rows {left} are pending, and no copy has reported them as skipped")
        return left

    def after_a_last_run(self, left: set[int], report: Report) -> None:
        """See that what was skipped is done by a lone copy."""
        done = {row for [row] in self._control.ask(self._subject.ask_done)}
        if done != self._rows or report.processed != len(left):
            raise Violation(f"rows {self._rows - done} are left after a last run: {report}")
