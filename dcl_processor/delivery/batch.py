"""The rows that one claim takes, and their outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.candidates.pending import Question, these
from dcl_processor.database.connection import reconnected
from dcl_processor.database.contention import is_contention, is_database_error, unwritable
from dcl_processor.errors import add_note, describe
from dcl_processor.exceptions import ProcessorError, SessionLost, TransactionLost
from dcl_processor.execution.handler import Failed, Handled, Outcome, as_exception, ends_the_run
from dcl_processor.locking.claiming import Claimed, Miss, claim
from dcl_processor.locking.isolation import row_transaction
from dcl_processor.settlement import writing
from dcl_processor.settlement.failure_columns import Values, notes
from dcl_processor.settlement.rehearsal import RowRefused

if TYPE_CHECKING:
    from dcl_processor.definition.definition import Definition
    from dcl_processor.execution.event_loop import EventLoop
    from dcl_processor.execution.resource import Resource

    from .heartbeat import Heartbeat

M = TypeVar("M", bound=Model)
Outcomes = dict[Any, Outcome | Miss]
#: A batch in progress. When it can only continue after handlers end, it yields the number of its
#: rows that wait for a free handler slot.
Steps = Generator[int, None, Outcomes]

logger = logging.getLogger("dcl_processor")


class InFlight(Protocol):
    """A record of the rows in flight that outlives the process."""

    def note(self, pks: Collection[Any]) -> None:
        """Record that all these rows are in flight."""
        raise NotImplementedError

    def narrow(self, index: int, pk: Any) -> None:
        """Record that only the row at this index of those rows, from 0, is in flight."""
        raise NotImplementedError


class Run(Protocol):
    """The attributes of a run that its delivery needs.

    ``doubtful``: the options whose flips require a check of each row afterwards. ``kept``: the
    values with which the constants of a claim are read back.
    """

    processor: Definition[Any]
    resource: Resource
    event_loop: EventLoop | None
    heartbeat: Heartbeat | None
    rehearsed: bool
    doubtful: Collection[str]
    kept: Values

    def may_start(self, so_far: dict[Any, Any]) -> bool:
        """Return whether a row may start; ``so_far``: its batch's outcomes, not counted yet."""
        raise NotImplementedError

    @property
    def in_flight(self) -> InFlight:
        """Return the record of the rows whose handler is about to be called."""
        raise NotImplementedError

    def rehearse(self, question: Question[Any], rows: Mapping[Any, Any]) -> None:
        """Rehearse the flips on the first row that the run claims."""
        raise NotImplementedError


class Batch(Generic[M]):
    """Candidates that go through the stages together.

    ``most``: how many of them to claim, the first that are free; ``None``: all of them.
    ``rows``: the claimed rows; ``attempts``: for each, the number of this attempt;
    ``started``: the rows whose handler was called; ``outcomes``: those of the handled rows.
    ``ended``: the outcomes of rows whose handlers ended and that are not settled yet; ``flips``:
    their flips, where known already; ``unknown``: those of them that may have been written.
    ``not_kept``: for each such row, the column that does not contain what the claim wrote;
    ``transaction_id``: that of the transaction with the rows' locks, if the database reports it;
    ``to_blame``: the row that makes the batch roll back, if it is known.
    """

    def __init__(
        self, run: Run, question: Question[M], pks: Sequence[Any], most: int | None = None
    ) -> None:
        self.run = run
        self.processor = run.processor
        self.question = question
        self.pks = pks
        self.most = most
        self.rows: dict[Any, M] = {}
        self.attempts: dict[Any, int] = {}
        self.outcomes: dict[Any, Outcome] = {}
        self.started: set[Any] = set()
        self.ended: dict[Any, Outcome] = {}
        self.flips: dict[Any, Values] = {}
        self.unknown: set[Any] = set()
        self.not_kept: dict[Any, str] = {}
        self.transaction_id: str | None = None
        self.to_blame: Any = None
        self._claimed: Claimed[M] | None = None
        self._session = connections[question.using].connection

    def claimed(self, claimed: Claimed[M]) -> None:
        """Store the claimed rows, before a handler changes them."""
        self._claimed = claimed
        self.rows = claimed.rows
        self.transaction_id = claimed.transaction_id
        retry = self.processor.retry
        if retry is not None:
            self.attempts = {pk: n + 1 for pk, n in self._counted(retry.attempts).items()}

    def _counted(self, name: str) -> dict[Any, int]:
        if all(name in vars(row) for row in self.rows.values()):
            return {pk: getattr(row, name) for pk, row in self.rows.items()}
        # Deferred by the user's queryset: one query for all rows, instead of one per instance.
        table = self.question.table
        return dict(table.filter(these(self.rows)).values_list("pk", name))

    def notes(self, pk: Any, outcome: Outcome, **undone: Values | None) -> tuple[Outcome, Values]:
        """Return the outcome to report for a row that was not handled, and the values to write.

        ``undone``: as in ``notes()``.
        """
        attempt = self.attempts.get(pk, 0)
        return notes(self.processor, self.rows[pk], outcome, attempt=attempt, **undone)

    def all_outcomes(self) -> Outcomes:
        """Return the outcomes of all candidates, including those that were not claimed."""
        misses = self._claimed.misses if self._claimed else {}
        return {**misses, **self.outcomes}

    def abandon(
        self,
        raised: BaseException,
        *,
        redo: Callable[[Run, Question[M], Sequence[Any]], Steps],
    ) -> Steps:
        """Go on after an error that rolled back the transaction and all its writes.

        The rows are redone one by one, so that only the row to blame fails. Raises an error that
        ``ends_the_run()``, and one that came before any handler and is no row's failure: that of a
        rehearsal, or of a claim that the database refused for another reason than contention.
        """
        if ends_the_run(raised) or (isinstance(raised, ProcessorError) and not self.started):
            raise raised
        error = as_exception(raised)
        if self._is_asked_again(error):
            return dict.fromkeys(self.pks[: self.most], Miss.ABSENT)
        # A claim may fail because of one row that cannot be loaded.
        ours = [*self.pks[: self.most]] if self._claimed is None else list(self.rows)
        outcomes: Outcomes = {} if self._claimed is None else dict(self._claimed.misses)
        # With several candidates it is not known which one caused the error.
        if len(ours) == 1 and (self._claimed is not None or len(self.pks) == 1):
            outcomes[ours[0]] = self._failed(ours[0], error)
            return outcomes
        if isinstance(error, TransactionLost):
            self._tell_of_end(ours)
        if self.to_blame is not None:
            # Alone, it would fail in the same way, so its handler is not called again.
            ours.remove(self.to_blame)
            outcomes[self.to_blame] = self._failed(self.to_blame, error)
        # Race: poison row. Each row is redone alone, so that one fails and the others are done.
        for pk in ours:
            if not self.run.may_start(outcomes):
                break
            outcomes.update((yield from redo(self.run, self.question, [pk])))
        return outcomes

    def _is_asked_again(self, error: Exception) -> bool:
        """Return whether to leave the rows to a later pass; raises errors that no row caused."""
        if not is_database_error(error):
            return False
        if (refused := self._refused(error)) is not None:
            raise refused from error
        if not self._wrote_nothing():
            return False
        passes = self._passes(error)
        if not passes and self._claimed is None:
            raise error
        return passes

    def _refused(self, error: Exception) -> ProcessorError | None:
        """Return the error to raise if the database refuses to write any row."""
        using = self.question.using
        # A read-only InnoDB still grants locks, so each row's handler would be called before its
        # flip is refused. Elsewhere a handler may have made its own transaction read-only.
        asked = self._wrote_nothing() or (self.outcomes and connections[using].vendor == "mysql")
        return unwritable(error, using) if asked else None

    def _tell_of_end(self, ours: Sequence[Any]) -> None:
        """Log which rows are handled again; the work that was committed for them stays."""
        again = [str(pk) for pk in ours if pk in self.started and pk != self.to_blame]
        if again:
            logger.warning(
                "%s: %s ended the transaction of its batch; work that it committed for other rows "
                "stays, and these are handled again: %s%s.",
                self.processor.name,
                "a handler" if self.to_blame is None else f"the handler of row {self.to_blame}",
                ", ".join(again[:5]),
                " and others" if len(again) > 5 else "",
            )

    def _wrote_nothing(self) -> bool:
        """Return whether the error came in the claim or the rehearsal, so before any COMMIT."""
        return self._claimed is None or not (self.run.rehearsed or self.started)

    def _passes(self, error: Exception) -> bool:
        """Return whether the error is transient: contention, or the loss of the session."""
        return is_contention(error) or reconnected(self.question.using, since=self._session)

    def _explained(self, error: Exception) -> Exception:
        """Return ``SessionLost`` instead of the error if the statement's session is gone."""
        if is_database_error(error) and reconnected(self.question.using, since=self._session):
            lost = SessionLost()
            lost.__cause__ = error
            return lost
        return error

    def _to_be_noted(self, failed: Failed) -> bool:
        """Return whether to write values to a row whose transaction is lost.

        Without ``retry`` only a failure of the handler itself gives a row up.
        """
        if self.processor.retry is not None:
            return True
        return self.processor._notes_failures and not failed.handled

    def _failed(self, pk: Any, error: Exception) -> Outcome:
        """Record a failure in a new transaction, because the row's own is lost."""
        failed = self.outcomes.get(pk)
        if isinstance(error, RowRefused):
            # No handler was called, and no attempt is counted.
            return Failed(error.error, handled=True)
        if isinstance(failed, Failed):
            # The handler's own error explains more than that of the lost transaction.
            add_note(failed.error, f"Its transaction was lost, too: {describe(error)}")
        elif failed is None or isinstance(failed, Handled):
            failed = Failed(self._explained(error), handled=True)
        if isinstance(failed, Failed) and not self._to_be_noted(failed):
            return failed
        again: Batch[M] = Batch(self.run, self.question, [pk])
        try:
            with row_transaction(self.question.using):
                # Race: double claim. Without the lock another worker may have finished the row.
                again.claimed(claim(self.question, [pk]))
                if again.rows:
                    failed, values = again.notes(pk, failed)
                    writing.write(self.question, [pk], values, self.processor.name)
        except Exception as second:  # noqa: BLE001  # the first is the one to be reported
            name = self.processor.name
            logger.warning(
                "%s: row %s failed, and no attempt was counted: %s", name, pk, describe(second)
            )
        return failed
