"""Work with no transaction open, and settle each row if its mark is still there."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeVar

from django.db import connections, transaction
from django.db.models import Model, Q, QuerySet

from . import settlement
from .batch import Batch
from .contention import is_contention, is_database_error
from .exceptions import AttemptsUsedUp
from .execution import Failed, Handled, Lost, Outcome, execute
from .marks import Mark

M = TypeVar("M", bound=Model)
Values = Mapping[str, Any]

logger = logging.getLogger("dcl_processor")

#: Seconds between the attempts to write a settlement: the work is done, and must not be for
#: nothing because a lock was in the way or a connection had been idle for too long.
PAUSES = (0.0, 0.1, 0.5, 2.0)


def work_and_settle(batch: Batch[M], mark: Mark) -> None:
    """Handle the claimed rows; each is settled as soon as its outcome is known."""
    started: set[Any] = set()
    try:
        # Closed before what is left is cleared up: that ends the handlers that are under way.
        with closing(_work(batch, mark, started)) as outcomes:
            for pk, outcome in outcomes:
                _settled(batch, mark, pk, outcome)
    finally:
        _clear_up(batch, mark, started)


def _work(
    batch: Batch[M], mark: Mark, started: set[Any]
) -> Generator[tuple[Any, Outcome], None, None]:
    run, processor = batch.run, batch.processor
    refused: list[tuple[Any, Outcome]] = []
    rows = _startable(batch, mark, started, refused)
    if run.event_loop is not None:
        yield from run.event_loop.handle(processor, rows, run.resource.arguments)
    else:
        for pk, row in rows:
            outcome = execute(processor, row, run.resource.arguments())
            if isinstance(outcome, Failed):
                run.resource.worn()
            yield pk, outcome
    yield from refused


def _startable(
    batch: Batch[M], mark: Mark, started: set[Any], refused: list[tuple[Any, Outcome]]
) -> Iterator[tuple[Any, M]]:
    """Yield the rows whose handlers may start, each when it may; put the others aside."""
    run, retry = batch.run, batch.processor.retry
    for pk, row in batch.rows.items():
        if not run.may_start(batch.outcomes):
            return
        if retry and batch.attempts[pk] > retry.max_attempts:
            refused.append((pk, Failed(AttemptsUsedUp(retry.max_attempts))))
        elif not mark.is_ours(pk):
            refused.append((pk, Lost()))
        else:
            started.add(pk)
            yield pk, row


def _settled(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> None:
    batch.outcomes[pk] = outcome
    batch.outcomes[pk] = _settle(batch, mark, pk, outcome)


def _settle(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> Outcome:
    """Write the outcome if the row is still ours, and return what became of it."""
    guard = mark.let_go(pk)
    if isinstance(outcome, Lost):
        # Not started. If nobody has taken the row over yet, it costs no attempt.
        _write_surely(batch, pk, guard, mark.before(pk))
        return outcome
    try:
        outcome, values = _values(batch, mark, pk, outcome)
        return _write(batch, pk, guard, values, outcome)
    except Exception as error:  # noqa: BLE001  # the work is done, the settlement is not
        return _unsettled(batch, mark, pk, guard, outcome, error)


def _write(batch: Batch[M], pk: Any, guard: Q, values: Values, outcome: Outcome) -> Outcome:
    if not values or _write_surely(batch, pk, guard, values, outcome):
        return outcome
    table: QuerySet[Any] = QuerySet(batch.question.model, using=batch.question.using)
    # Looked up, not guessed: the handler may have deleted its row.
    return Lost() if table.filter(pk=pk).exists() else outcome


def _unsettled(  # noqa: PLR0917  # what is needed to try again
    batch: Batch[M], mark: Mark, pk: Any, guard: Q, outcome: Outcome, error: Exception
) -> Outcome:
    """Note that a flip was refused: the row is to be tried again, if it may be at all."""
    if not isinstance(outcome, Handled):
        logger.warning("%s: row %s was not settled: %s", batch.processor.name, pk, error)
        # What the handler raised, if it did, says more than what kept it from being noted.
        return outcome if isinstance(outcome, Failed) else Failed(error)
    failed: Outcome = Failed(error, handled=True)
    if not mark.may_repeat or _passes(error, batch.question.using):
        return failed
    try:
        failed, values = _values(batch, mark, pk, failed)
        return _write(batch, pk, guard, values, failed)
    except Exception as second:  # noqa: BLE001  # the first is the one to be reported
        logger.warning("%s: row %s was not settled: %s", batch.processor.name, pk, second)
        return failed


def _values(batch: Batch[M], mark: Mark, pk: Any, outcome: Outcome) -> tuple[Outcome, Values]:
    processor = batch.processor
    if isinstance(outcome, Handled):
        if not mark.may_repeat and processor.claim is None:
            return outcome, {}  # flipped before the work
        try:
            return outcome, {**mark.removed, **processor.get_done(batch.rows[pk], outcome.result)}
        except Exception as error:  # noqa: BLE001  # the row's own failure
            outcome = Failed(error, handled=True)
    if isinstance(outcome, Failed) and outcome.handled and not mark.may_repeat:
        return outcome, {}  # done, and nothing says so: it stays in doubt, and is not repeated
    # Without retry a claimed row is known to have failed, and says so.
    undone = mark.undone if mark.may_repeat or processor.retry or not _failed(outcome) else None
    outcome, noted = settlement.notes(batch, pk, outcome, undone=undone)
    if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
        assert processor.retry is not None
        # The claim counted one more, for which no handler was called.
        noted = {**noted, processor.retry.attempts: processor.retry.max_attempts}
    columns = set(processor.retry.columns) if processor.retry else set()
    if not mark.may_repeat and not noted.keys() - columns:
        return outcome, noted  # still claimed, and still to be seen by in_doubt()
    return outcome, {**mark.removed, **noted}


def _failed(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed)


def _write_surely(
    batch: Batch[M], pk: Any, guard: Q, values: Values, outcome: Outcome | None = None
) -> bool:
    """Write; wait for what passes by itself, and connect anew. Tell whether the row was ours."""
    using, unknown = batch.question.using, False
    for pause in PAUSES:
        try:
            written = _written(batch, pk, guard, values, outcome)
        except Exception as error:
            if connections[using].in_atomic_block or not _passes(error, using):
                raise
            # Written twice it does no harm: the first removes the mark that the second looks for.
            unknown = unknown or not is_contention(error)
            connections[using].close_if_unusable_or_obsolete()
            time.sleep(pause)
        else:
            return written or (unknown and _is_there(batch, pk, values))
    return _written(batch, pk, guard, values, outcome)


def _is_there(batch: Batch[Any], pk: Any, values: Values) -> bool:
    """Tell whether the row says it all: a write whose answer was lost may have been committed."""
    constants = {
        name: value
        for name, value in values.items()
        if not hasattr(value, "resolve_expression") and not callable(value)
    }
    table: QuerySet[Any] = QuerySet(batch.question.model, using=batch.question.using)
    return table.filter(pk=pk, **constants).exists()


def _passes(error: Exception, using: str) -> bool:
    """Tell whether the same write may succeed a little later, or on a new connection."""
    if not is_database_error(error):
        return False
    connection: Any = connections[using]
    return is_contention(error) or connection.connection is None or not connection.is_usable()


def _written(batch: Batch[M], pk: Any, guard: Q, values: Values, outcome: Outcome | None) -> bool:
    question, processor = batch.question, batch.processor
    table: QuerySet[Any] = QuerySet(question.model, using=question.using)
    resolved = settlement.resolve(values)
    verify = isinstance(outcome, Handled) and not processor._has_fixed_flip
    if not verify or processor.repeats:
        return bool(table.filter(guard, pk=pk).update(**resolved))
    with transaction.atomic(using=question.using):
        written = table.filter(guard, pk=pk).update(**resolved)
        settlement.refuse_pending(processor, question, [pk] if written else [])
    return bool(written)


def _clear_up(batch: Batch[M], mark: Mark, started: set[Any]) -> None:
    """Settle what ended while the run was interrupted, and put back what was not started."""
    run = batch.run
    if run.event_loop is not None:
        for pk, outcome in run.event_loop.ended():
            _settled(batch, mark, pk, outcome)
    left = [pk for pk in batch.rows if pk not in batch.outcomes]
    for pk in left:
        if mark.may_repeat or pk not in started:
            _put_back(batch, mark, pk)


def _put_back(batch: Batch[M], mark: Mark, pk: Any) -> None:
    try:
        _write_surely(batch, pk, mark.let_go(pk), mark.before(pk))
    except Exception as error:  # noqa: BLE001  # the others are to be put back all the same
        logger.warning("%s: row %s was not put back: %s", batch.processor.name, pk, error)
