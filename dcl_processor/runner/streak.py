"""Decides, from consecutive outcomes, whether the next row would fail like those before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcl_processor.exceptions import InvalidDone, StillPending
from dcl_processor.execution.handler import Discarded, Failed, Handled, Lost, Outcome, Snoozed

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition

#: Failures that end a run in which nothing succeeds, unless the processor sets its own number.
MOST_FROM_THE_START = 50


@dataclass(slots=True)
class Streak:
    """The failures since a row was processed, and whether any row of the run succeeded.

    Rows at the head that always fail must not keep every run from trying the others. So a run in
    which nothing succeeded probes some rows at random places before it ends.
    """

    processor: Definition[Any]
    failed: int = 0
    #: Rows whose flip cannot be written, or leaves them pending.
    wrong: int = 0
    succeeded: bool = False
    #: Whether rows succeed, and the last ones did: one more success changes nothing.
    goes_well: bool = False
    #: Whether the run is to end, because the next row would fail like those before.
    ends_the_run: bool = False
    #: The number of rows to take from random places before the failures end the run.
    to_probe: int = 0
    #: Whether that was done, which is once in a run.
    has_probed: bool = False

    def note(self, outcome: Outcome) -> None:
        """Take one more outcome into account."""
        match outcome:
            case Handled():
                self.succeeded, self.failed, self.goes_well = True, 0, True
                self.ends_the_run, self.to_probe = False, 0
                return
            case Snoozed() | Discarded():
                self.succeeded = True
            case Failed():
                self.failed += 1
                self.wrong += _is_wrong(outcome)
            case Lost(called=True):
                self.failed += 1
        self.goes_well = self.succeeded and not self.failed
        self.ends_the_run = self._processor_is_wrong or self.failed >= self._most
        self.to_probe = self._number_to_probe()

    @property
    def _processor_is_wrong(self) -> bool:
        """Whether the processor is at fault: no flip of the handled rows could be written.

        The first such row counts as a failure of that row. At the second one the run has to end,
        because every later run would repeat each further handler call.
        """
        return self.wrong >= 2 and not self.succeeded

    def _number_to_probe(self) -> int:
        # A strict order has no random places, and keys are visited from a random one.
        if self.succeeded or self.has_probed or self.processor.strict_order:
            return 0
        if self.processor.group_by is not None:
            return 0
        if self.wrong:
            return 1
        return int(self._most - self.failed) if self.failed >= self._most / 2 else 0

    @property
    def _most(self) -> float:
        most = self.processor.max_consecutive_failures
        if most is None and not (self.succeeded or self.processor.strict_order):
            return MOST_FROM_THE_START
        return most or math.inf


def _is_wrong(outcome: Failed) -> bool:
    # If the handler itself raised the error, it may be another processor's error.
    return outcome.handled and isinstance(outcome.error, StillPending | InvalidDone)
