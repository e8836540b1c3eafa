"""A lane: one session's way through the candidates. The loop of the package is ``drive()``."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dcl_processor import observers
from dcl_processor.delivery.ages import pending_ages

from . import recovery
from .claim import claim
from .deliveries import DELIVERIES
from .session import Session
from .settlement import Batch, NotSettled, Settlement
from .work import read_attempts

if TYPE_CHECKING:
    from .run import Run


class Lane:
    """Delivers batches, one after another, on one session; a run has one lane for each thread."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.processor = run.processor
        self.source = run.source
        self.resource = run.resource
        self.in_flight = run.in_flight
        self.session = Session(run.using, run.processor.name)
        self._deliver = DELIVERIES[run.processor.delivery]
        #: What the last batch still has to send.
        self._after: Settlement | None = None
        #: The driver's connection before the delivery at hand.
        self.driver: Any = None

    def drive(self) -> None:
        """Deliver rows until none is left; each settlement goes with the next claim if it may."""
        try:
            while True:
                while (batch := self.source.take()) is not None:
                    self.deliver(batch)
                    if self._after is not None and not self.may_wait(self._after):
                        self.settle()
                # It waits for no read of candidates, and for no other lane.
                self.settle()
                if not self.source.refill():
                    return
        except BaseException:
            self.run.is_interrupted = True
            raise
        finally:
            with ExitStack() as steps:  # in reverse order, each of them
                steps.callback(self.in_flight.close)
                steps.callback(self.resource.close)
                steps.callback(self.session.rollback)
                steps.callback(self.settle)

    def may_wait(self, after: Settlement) -> bool:
        """Whether no code of the user runs, and nothing is decided, before the next claim."""
        return (
            after.is_plain_success
            and self.session.combines
            and not self.session.connection.run_on_commit
            and self.run.goes_well()
        )

    def deliver(self, batch: Batch) -> None:
        """Claim, handle and flip a batch; what it still has to send waits."""
        if not self.resource.is_open:
            self.settle()
        after, self.driver = self._after, self.session.connection.connection
        try:
            if not self.resource.ready():
                self.source.give_back(batch)
                return
            self._after = self._deliver(self, batch, after)
        except NotSettled as error:
            # The claim may be as good as it was. The batch that waited is counted first, and its
            # outcome may end the run; if it does not, these rows are claimed again.
            self.source.give_back(batch)
            self._failed(error)
        except BaseException as error:  # noqa: BLE001  # raised again if it ends the run
            self.settle()
            recovery.recover(self, batch, error)
        finally:
            self.in_flight.forget()

    def claim(self, batch: Batch, after: Settlement | None) -> None:
        """Lock the batch's rows, and check them again; ``after`` is committed first."""
        try:
            batch.claimed = claim(self.session, batch.question, batch.wanted, after)
        finally:
            if after is not None and after.answers is not None:
                self._settled()
        self.source.note_claim(batch)
        rows = batch.claimed.rows
        if rows:
            read_attempts(self.processor, batch.question, rows)
            self.run.verify(batch.question, rows[0])
        if observers.active and rows:
            batch.claimed_at = time.monotonic()
            ages = pending_ages(self.processor, [held.row for held in rows])
            observers.tell("claimed", self.processor.name, ages)

    def settle(self) -> None:
        """Send what waits alone, and count what is true then."""
        after = self._after
        if after is None:
            return
        if after.answers is None:
            try:
                self.session.settle(after)
            except NotSettled as error:
                self._failed(error)
                return
        self._settled()

    def _settled(self) -> None:
        """Count the batch whose settlement was committed."""
        if self._after is not None:
            self.count(self._after)
            self._after = None

    def count(self, after: Settlement) -> None:
        batch = after.batch
        if batch.claimed_at is not None:
            seconds, batch.claimed_at = time.monotonic() - batch.claimed_at, None
            observers.tell("unlocked", self.processor.name, seconds)
        self.source.end(batch)

    def _failed(self, error: NotSettled) -> None:
        """Settle alone what was in a message that failed."""
        after, self._after = self._after, None
        assert after is not None
        assert error.__cause__ is not None
        recovery.settle_alone(self, after, error.__cause__)
