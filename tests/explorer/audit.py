"""What must hold in every schedule: I2 of each delivery, and that a run ends with all rows done.

As many handlers as rows, since nothing dies here and no lease lapses but where time passes: there
a second handler is allowed for each lease that was lost, and one settlement all the same. A handler
that ends its transaction has its row fail, and another one is allowed for that; and so it is for a
row that is made pending again.

Of rows in keys, no more than there may be are in flight after any step, and in order no row is
handled before one that its copy could see before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dcl_processor import Report
from dcl_processor.exceptions import ProcessorError

from .actors import STAGE, Actor
from .control import Control
from .schedule import Violation
from .steps import COMMIT, DEATH, HANDLER, KEY_LOCK, READ, ROLLBACK, Step
from .subjects import Subject

#: What a row may fail by whose lease has lapsed.
LATE = (ProcessorError, TimeoutError)


class Audit:
    """Watches one schedule."""

    def __init__(
        self, subject: Subject, rows: Sequence[int], control: Control, first: Actor
    ) -> None:
        self._subject, self._control, self._first = subject, control, first
        self._rows = {row + STAGE * stage for row in rows for stage in range(subject.stages)}
        self._done: set[int] = set()
        self.handled: Counter[int] = Counter()
        #: Leases that lapsed while they were held: each allows one more handler.
        self._lapsed: Counter[int] = Counter()
        self.time_has_passed = False
        #: How often rows were made pending again, which allows one more handler, too.
        self._edited: Counter[int] = Counter()
        #: Whether the first copy has died, and rows that it had handled and not settled.
        self.dead, self._unsettled = False, Counter[int]()
        #: Who has handled each row, and by whose step it was done.
        self._handled_by: dict[int, list[Actor]] = {}
        self._done_by: dict[int, Actor] = {}
        #: The rows that were done when each copy last asked for the lock of a key.
        self._done_at_lock: dict[Actor, set[int]] = {}
        #: The row that each copy has in a transaction.
        self._at_work: dict[Actor, int] = {}

    def after(self, actor: Actor, step: Step) -> None:
        """Look at each handler and each commit, as soon as it was there."""
        if step.name == HANDLER.name:
            self._handler(actor, max(step.rows))  # in a second stage
        if step.name in {KEY_LOCK.name, READ.name}:
            self._done_at_lock[actor] = self._done
        if step.name in {COMMIT.name, ROLLBACK.name} and "lock" in step.writes:
            self._at_work.pop(actor, None)
        if "time" in step.writes:
            self.time_has_passed = True
            self._lapsed.update({row for [row] in self._control.ask(self._subject.ask_leased)})
        if step.name == DEATH.name and self._first.is_dead:
            self._death()
        if "data" in step.writes:
            self._look(actor, step)
        if step.writes & {"data", "handler"} and self._subject.most:
            self._look_at_keys(actor, step)

    def _handler(self, actor: Actor, row: int) -> None:
        self.handled[row] += 1
        self._handled_by.setdefault(row, []).append(actor)
        # A copy that stood still for a whole lease, between its last look at it and its handler,
        # has no way to know.
        if row in self._done and not self._lapsed[row]:
            raise Violation(f"row {row % 10} was handled after its flip was committed")
        self._look_at_order(actor, row)
        self._at_work[actor] = row

    def _death(self) -> None:
        self.dead = True
        mine = {row for row, actors in self._handled_by.items() if self._first in actors}
        self._unsettled.update(row for row in mine if self._done_by.get(row) != self._first)
        self._at_work.pop(self._first, None)

    def _look_at_order(self, actor: Actor, row: int) -> None:
        """See that all rows before it in its key are done, and so none of them is in flight.

        But for one that was made pending again when its copy had asked which row comes first.
        """
        if not self._subject.in_order:
            return
        keys = self._subject.keys
        before = {each for each in self._rows if each % keys == row % keys and each < row}
        if passed := before - self._done - self._done_at_lock.get(actor, set()):
            raise Violation(f"row {row % 10} was handled before {passed} of its key")

    def _look_at_keys(self, actor: Actor, step: Step) -> None:
        """See that no key has more rows in flight than it may have."""
        keys = [row % self._subject.keys for row in self._at_work.values()]
        if self._subject.ask_in_flight:
            keys = [key for [key] in self._control.ask(self._subject.ask_in_flight)]
        for key, number in Counter(keys).items():
            if number > self._subject.most:
                raise Violation(
                    f"{number} rows of key {key} are in flight, of {self._subject.most}, "
                    f"when {actor.name} came to: {step}"
                )

    def _look(self, actor: Actor, step: Step) -> None:
        done = {row for [row] in self._control.ask(self._subject.ask_done)}
        for row in done - self._done:
            if not self.handled[row]:
                raise Violation(f"{actor.name} flipped row {row % 10} without a handler at: {step}")
        # Not by whose step it was: an edit that waits for a lock comes with another one's COMMIT.
        edited = Counter(dict(self._control.ask(self._subject.ask_edited)))
        back = {row for row in self._done - done if edited[row] == self._edited[row]}
        self._edited = edited
        self._done_by |= dict.fromkeys(done - self._done, actor)
        if back:
            raise Violation(f"{actor.name} took a committed flip back at: {step}")
        self._done = done

    def at_the_end(self, reports: Sequence[Report]) -> set[int]:
        """Judge what the workers that live did; return the rows that they left."""
        left = self._rows - self._done
        done = {row for row in self._done if not (self.dead and self._done_by[row].number == 0)}
        processed = sum(report.processed for report in reports)
        lost = sum(report.lease_lost for report in reports)
        failed = Counter(failure.pk for report in reports for failure in report.failures)
        self._unsettled = Counter({} if self._subject.once else self._unsettled)
        more = self._lapsed + failed + self._edited + self._unsettled
        allowed = {row: 1 + more[row] for row in self.handled}
        if twice := {row % 10 for row in self.handled if self.handled[row] > allowed[row]}:
            raise Violation(f"two handlers of row {twice}, {processed} processed")
        self._look_at_errors(reports)
        over = processed - len(done)
        if not 0 <= over <= self._edited.total() or set(self.handled) < self._done:
            raise Violation(f"{processed} rows were reported as processed, of {done} done")
        dead = len(self._done - done) + self._unsettled.total() + self.dead * self._subject.once
        if self.handled.total() > processed + lost + failed.total() + dead:
            raise Violation(f"{self.handled.total()} handlers, {processed} processed, {lost} lost")
        leased = {row for [row] in self._control.ask(self._subject.ask_leased)}
        if leased & self._done:
            raise Violation(f"rows {leased & self._done} are done, and have a lease")
        # A run that leaves a row behind reports it.
        comes_later = self._edited or self._subject.stages > 1
        told = any(report.skipped or report.held for report in reports)
        is_known = lost or failed or comes_later or told or self.dead
        if left and not is_known:
            raise Violation(f"rows {left} are pending, and no copy has reported them as skipped")
        return left

    def _look_at_errors(self, reports: Sequence[Report]) -> None:
        for report in reports:
            errors = [failure.error for failure in report.failures]
            wrong = [error for error in errors if not isinstance(error, self._subject.fails_by)]
            if self.time_has_passed:
                # A row may be given back untouched, if its claim took as long as a lease; and the
                # lease of one may lapse while another session has it locked.
                wrong = [error for error in wrong if type(error) not in LATE]
            if (
                wrong
                or report.failed > len(errors)
                or (report.lease_lost and not self.time_has_passed)
            ):
                raise Violation(f"a copy failed: {report}") from next(iter(wrong), None)

    def after_a_last_run(self, left: set[int], report: Report) -> None:
        """See that what was left is done by a lone copy, but for what is in doubt."""
        done = {row for [row] in self._control.ask(self._subject.ask_done)}
        doubt = set[int]()
        if self.dead and self._subject.once:
            doubt = {
                row for [row] in self._control.ask("SELECT id FROM tests_errand WHERE claimed")
            }
        if done != self._rows - doubt or report.processed != len(left - doubt):
            raise Violation(f"rows {self._rows - done} are left after a last run: {report}")
