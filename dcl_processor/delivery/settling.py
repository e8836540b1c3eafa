"""Write the outcome of a row, only if the row still has this worker's mark."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor.database.contention import is_contention, is_database_error
from dcl_processor.exceptions import AttemptsUsedUp
from dcl_processor.execution.handler import (
    Failed,
    Handled,
    Lost,
    Outcome,
    as_exception,
    ends_the_run,
)
from dcl_processor.locking.waiting import settlement_transaction
from dcl_processor.settlement import writing
from dcl_processor.settlement.flip import refusing_values

from . import together
from .batch import Batch
from .compare_and_set import Guard, write
from .marks import Mark

M = TypeVar("M", bound=Model)
Values = Mapping[str, Any]

logger = logging.getLogger("dcl_processor")

#: Seconds between the attempts to write a settlement.
# Race: work without flip. The work is done, so a lock that another session holds or a connection
# that was idle for too long must not lose the flip.
PAUSES = (0.0, 0.1, 0.5, 2.0)


def settle_ended(batch: Batch[M], mark: Mark) -> None:
    """Settle the rows whose handlers have ended."""
    if len(batch.ended) > 1:
        together.settle(batch, mark)
    while batch.ended:
        pk = next(iter(batch.ended))
        settle(batch, mark, pk, batch.ended[pk])


def settle(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> None:
    """Settle a row; its final outcome may differ from ``outcome``."""
    batch.outcomes[pk] = outcome
    batch.ended.pop(pk, None)
    batch.outcomes[pk] = _settle(batch, mark, pk, outcome)


def _settle(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> Outcome:
    """Write the outcome if this worker still holds the row, and return the final outcome."""
    guard = mark.let_go(pk)
    if isinstance(outcome, Lost):
        # Not started. If no other worker has taken the row over yet, no attempt is counted.
        _write_surely(batch, pk, guard, mark.before(pk))
        return outcome
    try:
        return _note(batch, mark, pk, guard, outcome)
    except Exception as error:
        if ends_the_run(error):
            # The work is done. It must not be repeated because an interrupt came during this write.
            _note(batch, mark, pk, guard, outcome)
            raise
        return _unsettled(batch, mark, pk, guard, outcome, error)


def _note(batch: Batch[M], mark: Mark, pk: Any, guard: Guard, outcome: Outcome) -> Outcome:
    outcome, values = _values(batch, mark, pk, outcome)
    return _write(batch, pk, guard, values, outcome)


def _write(batch: Batch[M], pk: Any, guard: Guard, values: Values, outcome: Outcome) -> Outcome:
    if not values or _write_surely(batch, pk, guard, values, outcome):
        return outcome
    table = batch.question.table
    # A query is needed, because the handler may have deleted its row.
    if table.filter(pk=pk).exists():
        return Lost()
    if isinstance(outcome, Handled):
        writing.refuse_moved(batch.question, {pk: batch.rows[pk]}, batch.processor.name)
    return outcome


def _unsettled(  # noqa: PLR0917  # what is needed to try again
    batch: Batch[M], mark: Mark, pk: Any, guard: Guard, outcome: Outcome, error: Exception
) -> Outcome:
    """Record that the flip failed, so that the row is retried if its delivery allows that."""
    if not isinstance(outcome, Handled):
        logger.warning("%s: row %s was not settled: %s", batch.processor.name, pk, error)
        # The handler's own error, if any, explains more than the error of the settlement.
        return outcome if isinstance(outcome, Failed) else Failed(error)
    failed: Outcome = Failed(error, handled=True)
    if not mark.may_repeat or _passes(error, batch.question.using):
        return failed
    try:
        return _note(batch, mark, pk, guard, failed)
    except Exception as second:  # noqa: BLE001  # the first is the one to be reported
        logger.warning("%s: row %s was not settled: %s", batch.processor.name, pk, second)
        return failed


def _values(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> tuple[Outcome, Values]:
    processor = batch.processor
    if isinstance(outcome, Handled):
        if not mark.may_repeat and processor.claim is None:
            return outcome, {}  # flipped before the work
        try:
            return outcome, together.flip(batch, mark, pk, outcome)
        except BaseException as error:
            if ends_the_run(error):
                raise
            outcome = Failed(as_exception(error), handled=True)
    if isinstance(outcome, Failed) and outcome.handled and not mark.may_repeat:
        return outcome, {}  # done but not recorded: it stays in doubt, and is not repeated
    # Without retry a claimed row that failed is recorded as failed, and is not put back.
    undone = mark.undone if mark.may_repeat or processor.retry or not _failed(outcome) else None
    outcome, noted = batch.notes(pk, outcome, undone=undone)
    if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
        assert processor.retry is not None
        # The claim counted one more attempt, for which no handler was called.
        noted = {**noted, processor.retry.attempts: processor.retry.max_attempts}
    columns = set(processor.retry.columns) if processor.retry else set()
    if not mark.may_repeat and not noted.keys() - columns:
        return outcome, noted  # still claimed, so in_doubt() still returns it
    return outcome, {**mark.removed, **noted}


def _failed(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed)


def _write_surely(
    batch: Batch[M], pk: Any, guard: Guard, values: Values, outcome: Outcome | None = None
) -> bool:
    """Write; retry transient errors and reconnect. Return whether this worker held the row."""
    using, unknown = batch.question.using, pk in batch.unknown
    for pause in PAUSES:
        session = connections[using].connection
        try:
            written = _written(batch, pk, guard, values, outcome)
        except Exception as error:
            if connections[using].in_atomic_block or not _passes(error, using, since=session):
                raise
            # A second write does no harm, because the first removes the mark that it requires.
            unknown = unknown or not is_contention(error)
            connections[using].close_if_unusable_or_obsolete()
            time.sleep(pause)
        else:
            return written or (unknown and _is_there(batch, pk, values))
    return _written(batch, pk, guard, values, outcome) or (unknown and _is_there(batch, pk, values))


def _is_there(batch: Batch[Any], pk: Any, values: Values) -> bool:
    """Return whether the row has all values; a write whose answer was lost may be committed."""
    constants = {
        name: value
        for name, value in values.items()
        if not hasattr(value, "resolve_expression") and not callable(value)
    }
    table = batch.question.table
    return table.filter(pk=pk, **constants).exists()


def _passes(error: Exception, using: str, *, since: Any = None) -> bool:
    """Return whether the same write may succeed a little later, or on a new connection.

    ``since``: the driver's connection as it was before the error.
    """
    if not is_database_error(error):
        return False
    connection: Any = connections[using]
    if is_contention(error) or connection.connection is None or not connection.is_usable():
        return True
    # Django itself reconnects if the ROLLBACK of a transaction finds that the session is gone.
    return since is not None and connection.connection is not since


def _written(
    batch: Batch[M], pk: Any, guard: Guard, values: Values, outcome: Outcome | None
) -> bool:
    question, processor = batch.question, batch.processor
    resolved = writing.resolve(values)
    if not isinstance(outcome, Handled):
        return bool(write(question, pk, guard, resolved))
    if "done" not in batch.run.doubtful:
        with refusing_values(processor):
            return bool(write(question, pk, guard, resolved))
    with settlement_transaction(question.using), refusing_values(processor):
        written = write(question, pk, guard, resolved)
        writing.refuse_pending(processor, question, [pk] if written else [])
    return bool(written)


def put_back(batch: Batch[M], mark: Mark, pk: Any) -> None:
    """Remove the mark from a row whose handler was not called, or may be called again."""
    try:
        _write_surely(batch, pk, mark.let_go(pk), mark.before(pk))
    except Exception as error:  # noqa: BLE001  # the others are to be put back all the same
        logger.warning("%s: row %s was not put back: %s", batch.processor.name, pk, error)
