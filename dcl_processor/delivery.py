"""The orders in which lock, work, flip and commit can follow each other."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from django.db.models import Model

from .contention import is_contention, is_database_error
from .exceptions import ProcessorError
from .execution import Failed, Handled, execute
from .isolation import row_transaction
from .locking import Miss, claim
from .pending import Question
from .settlement import settle

if TYPE_CHECKING:
    from .definition import BatchProcessor

M = TypeVar("M", bound=Model)
Outcome = Handled | Failed | Miss


class Delivery(StrEnum):
    """What a crash does to a row.

    ``TRANSACTIONAL``: lock and ask again → work → flip → commit. Work in the same database
    happens exactly once; an effect outside it, such as an e-mail, may be repeated when the
    process dies between the effect and the commit.

    ``AT_MOST_ONCE`` and ``AT_LEAST_ONCE`` are names this version knows and refuses.
    """

    TRANSACTIONAL = "transactional"
    AT_MOST_ONCE = "at_most_once"
    AT_LEAST_ONCE = "at_least_once"


def transactional(
    processor: BatchProcessor[M],
    question: Question[M],
    pk: Any,
    before_handler: Callable[[Question[M], Any], None],
) -> Outcome:
    """Lock and ask again → work → flip → commit, in one transaction.

    ``before_handler`` is called with a claimed row's key. Raises what it raises, and database
    errors of the claim that are not contention; everything else is an outcome.
    """
    row: M | Miss = Miss.ABSENT
    outcome: Handled | Failed | None = None
    try:
        with row_transaction(question.using):
            row = claim(question, pk)
            if isinstance(row, Miss):
                return row
            before_handler(question, pk)
            outcome = execute(processor, row, question.using)
            outcome = settle(processor, question, pk, row, outcome)
    except ProcessorError:
        raise
    except Exception as error:
        # A claim that the database refused is nobody's failure.
        if isinstance(row, Miss) and is_database_error(error):
            if is_contention(error):
                return Miss.ABSENT
            raise
        # The row could not be loaded or rehearsed, or its COMMIT failed.
        return Failed(error, handled=outcome is not None)
    return outcome
