"""The rows that one claim takes, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django.db.models import Model, QuerySet

from . import settlement
from .contention import is_contention, is_database_error
from .errors import describe
from .exceptions import ProcessorError
from .execution import Failed, Handled, Outcome
from .isolation import reconnected, row_transaction
from .locking import Claimed, Miss, claim
from .pending import Question, these

if TYPE_CHECKING:
    from .runner import Run

M = TypeVar("M", bound=Model)
Outcomes = dict[Any, Outcome | Miss]

logger = logging.getLogger("dcl_processor")


class Batch(Generic[M]):
    """Some candidates on their way through the stages.

    ``rows``: those that were claimed; ``attempts``: for each, the number of this attempt;
    ``started``: whether a handler was called; ``outcomes``: of the rows that were handled.
    """

    def __init__(self, run: Run[M], question: Question[M], pks: Sequence[Any]) -> None:
        self.run = run
        self.processor = run.processor
        self.question = question
        self.pks = pks
        self.rows: dict[Any, M] = {}
        self.attempts: dict[Any, int] = {}
        self.outcomes: dict[Any, Outcome] = {}
        self.started = False
        self._claimed: Claimed[M] | None = None

    def claimed(self, claimed: Claimed[M]) -> None:
        """Take the rows that were claimed, before a handler does anything to them."""
        self._claimed = claimed
        self.rows = claimed.rows
        retry = self.processor.retry
        if retry is not None:
            self.attempts = {pk: n + 1 for pk, n in self._counted(retry.attempts).items()}

    def _counted(self, name: str) -> dict[Any, int]:
        if all(name in vars(row) for row in self.rows.values()):
            return {pk: getattr(row, name) for pk, row in self.rows.items()}
        # Deferred by the user's queryset: asked once for all, and not by each instance.
        table: QuerySet[M] = QuerySet(self.question.model, using=self.question.using)
        return dict(table.filter(these(self.rows)).values_list("pk", name))

    def all_outcomes(self) -> Outcomes:
        """Return what became of the candidates, those that were not claimed included."""
        misses = self._claimed.misses if self._claimed else {}
        return {**misses, **self.outcomes}

    def abandon(
        self,
        error: Exception,
        *,
        redo: Callable[[Run[M], Question[M], Sequence[Any]], Outcomes],
    ) -> Outcomes:
        """Go on after an error that cost the transaction: nothing of it is written.

        The rows are redone one by one, so that the one to blame is alone with it. Raises what
        came before any handler and is nobody's failure: a rehearsal's error, and a claim that the
        database refused for another reason than contention.
        """
        if isinstance(error, ProcessorError) and not self.started:
            raise error
        if self._claimed is None and is_database_error(error):
            # Asked again later, too: what a session lost that was ended while nobody used it.
            if not is_contention(error) and not reconnected(self.question.using):
                raise error
            return dict.fromkeys(self.pks, Miss.ABSENT)
        # A claim may fail because of one row that cannot be loaded.
        ours = self.pks if self._claimed is None else list(self.rows)
        outcomes: Outcomes = {} if self._claimed is None else dict(self._claimed.misses)
        if len(ours) == 1:
            outcomes[ours[0]] = self._failed(ours[0], error)
            return outcomes
        for pk in ours:
            if not self.run.may_start(outcomes):
                break
            outcomes.update(redo(self.run, self.question, [pk]))
        return outcomes

    def _failed(self, pk: Any, error: Exception) -> Outcome:
        """Note a failure in a transaction of its own, the row's own being lost."""
        failed = self.outcomes.get(pk)
        if isinstance(failed, Failed):
            # The handler's own error says more than what the lost transaction made of it.
            failed.error.add_note(f"Its transaction was lost, too: {describe(error)}")
        else:
            failed = Failed(error, handled=isinstance(failed, Handled))
        if self.processor.retry is None:
            return failed
        again: Batch[M] = Batch(self.run, self.question, [pk])
        try:
            with row_transaction(self.question.using):
                # Second check: the lock is gone, and somebody else may have finished the row.
                again.claimed(claim(self.question, [pk]))
                if again.rows:
                    failed, values = settlement.notes(again, pk, failed)
                    settlement.write(self.question, [pk], values, self.processor.name)
        except Exception as second:  # noqa: BLE001  # the first is the one to be reported
            name = self.processor.name
            logger.warning("%s: row %s failed, and no attempt was counted: %s", name, pk, second)
        return failed
