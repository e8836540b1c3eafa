"""Write the outcomes of rows, each only if the row still has this worker's mark."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from django.db import connections
from django.db.models import Model

from dcl_processor import log_fields
from dcl_processor.database.contention import is_contention, is_database_error
from dcl_processor.definition.model_columns import by_attname
from dcl_processor.exceptions import AttemptsUsedUp
from dcl_processor.execution.handler import (
    Discarded,
    Failed,
    Handled,
    Lost,
    Outcome,
    Snoozed,
    UsedUp,
    as_exception,
)
from dcl_processor.interrupts import ends_the_run
from dcl_processor.locking.waiting import settlement_transaction
from dcl_processor.settlement import grouping, writing
from dcl_processor.settlement.flip import UNWRITABLE, flip, invalid_done
from dcl_processor.values import Values, constants_of, resolve

from . import compare_and_set
from .batch import Batch
from .compare_and_set import Expected, write, write_all
from .marks import MarkedRows

M = TypeVar("M", bound=Model)

logger = logging.getLogger("dcl_processor")

#: Seconds between the attempts to write a settlement.
PAUSES = (0.0, 0.1, 0.5, 2.0)


class SomeRowsLostError(Exception):
    """A row was taken over, or is gone; settling each row alone finds out which one."""


def settle(batch: Batch[M], pk: Any, outcome: Outcome, *, is_last: bool = False) -> None:
    """Settle a row; its final outcome may differ from ``outcome``.

    An interrupt during the write is raised again after one more write, and at once if ``is_last``.
    """
    marked = _marked(batch)
    final = outcome
    try:
        # Race: work without flip. The next two lines are inside the ``try``: after an interrupt in
        # them, the row is still settled.
        batch.outcomes[pk] = outcome
        marked.ended.pop(pk, None)
        final, values = _values(batch, marked, pk, outcome)
        written = not values or _write(
            batch, marked, pk, values, is_flip=isinstance(final, Handled)
        )
        if not written and not isinstance(final, Lost | UsedUp):
            final = _not_written(batch, pk, final)
    except BaseException as error:
        if ends_the_run(error):
            if is_last:
                batch.outcomes[pk] = outcome if isinstance(outcome, Lost | UsedUp) else Lost()
            else:
                # Race: work without flip. The work is done, so an interrupt during the write must
                # not lose the flip. The interrupted write may have been committed.
                marked.maybe_written.add(pk)
                settle(batch, pk, outcome, is_last=True)
            raise
        if not isinstance(error, Exception):
            raise
        final = _unsettled(batch, marked, pk, outcome, error)
    batch.outcomes[pk] = final


def _marked(batch: Batch[Any]) -> MarkedRows:
    marked = batch.marked
    assert marked is not None
    return marked


def _values(
    batch: Batch[M], marked: MarkedRows, pk: Any, outcome: Outcome
) -> tuple[Outcome, Values]:
    """Return the outcome to report for a row, and the values to write to it."""
    mark = marked.mark
    unstarted = isinstance(outcome, Failed) and outcome.unstarted
    if unstarted or isinstance(outcome, Lost | UsedUp):
        # Not started. If no other worker has taken the row over yet, no attempt is counted.
        return outcome, marked.put_back(pk)
    if isinstance(outcome, Handled):
        if mark.option == "done":
            return outcome, {}  # flipped before the work
        try:
            return outcome, flip_of(batch, marked, pk, outcome)
        except BaseException as error:
            if ends_the_run(error):
                raise
            outcome = Failed(as_exception(error), handled=True, duration=outcome.duration)
    return _values_of_failure(batch, marked, pk, outcome)


def _values_of_failure(
    batch: Batch[M], marked: MarkedRows, pk: Any, outcome: Outcome
) -> tuple[Outcome, Values]:
    processor, mark = batch.processor, marked.mark
    if isinstance(outcome, Failed) and outcome.handled and not mark.is_lease:
        return outcome, {}  # done but not recorded: it stays in doubt, and is not repeated
    # Without retry a claimed row that failed is recorded as failed, and is not put back.
    stays_claimed = not mark.is_lease and not processor.retry and isinstance(outcome, Failed)
    undone = None if stays_claimed else mark.undone
    if isinstance(outcome, Failed | Snoozed | Discarded) and outcome.unprepared:
        # The next worker is to call taken_over() again.
        undone = marked.put_back(pk)
    outcome, noted = batch.notes(pk, outcome, undone=undone)
    if isinstance(outcome, Failed) and isinstance(outcome.error, AttemptsUsedUp):
        assert processor.retry is not None
        if processor.retry.attempts is not None:
            # The claim counted one more attempt, for which no handler was called.
            noted = {**noted, processor.retry.attempts: outcome.max_attempts}
    columns = set(processor.retry.columns) if processor.retry else set()
    if not mark.is_lease and not noted.keys() - columns:
        return outcome, noted  # still claimed, so in_doubt() still returns it
    if mark.reset:
        # A failure that writes a dead letter, and one that writes nothing, remove the mark, too.
        noted = {**mark.reset, **by_attname(batch.question.model, noted)}
    return outcome, {**mark.removed, **noted}


def flip_of(batch: Batch[M], marked: MarkedRows, pk: Any, outcome: Handled) -> Values:
    """Return the values that take a handled row out of pending, and remove its mark."""
    known = marked.flips.pop(pk, None)
    if known is not None:
        return known
    return {**marked.mark.removed, **flip(batch.processor, batch.rows[pk], outcome.result)}


def expected_of(batch: Batch[M], marked: MarkedRows, pk: Any) -> Expected:
    """Return what recognises the row as this worker's in its last write; ends its renewals.

    A claim is recognised by all columns that it wrote, as they were read back. A lease is
    recognised by every token that this worker may have written.
    """
    if pk not in marked.expected:
        heartbeat, written, mark = batch.context.heartbeat, marked.after[pk], marked.mark
        if heartbeat is not None:
            marked.expected[pk] = heartbeat.let_go(pk, written)
        elif mark.lease is not None:
            # Handed out: no heartbeat has renewed the lease.
            marked.expected[pk] = {mark.lease.field: [written[mark.lease.field]]}
        else:
            marked.expected[pk] = {name: [value] for name, value in written.items()}
    return marked.expected[pk]


def _write(
    batch: Batch[M],
    marked: MarkedRows,
    pk: Any,
    values: Values,
    *,
    is_flip: bool = False,
) -> bool:
    """Write; retry transient errors and reconnect. Return whether this worker held the row.

    ``is_flip``: the values have to take the row out of pending.
    """
    question, using = batch.question, batch.question.using
    expected, unknown = expected_of(batch, marked, pk), pk in marked.maybe_written
    check = is_flip and batch.context.needs_check("done")
    resolved = resolve(values)
    # Race: work without flip. The work is done, so a lock that another session holds, or a
    # connection that was idle for too long, must not lose the flip.
    for pause in (*PAUSES, None):
        session = connections[using].connection
        try:
            with settlement_transaction(using) if check else nullcontext():
                written = write(question, pk, expected, resolved)
                if check and written:
                    writing.refuse_pending(batch.processor, question, [pk])
        except UNWRITABLE as error:
            if is_flip:
                raise invalid_done(batch.processor, error) from error
            raise
        except Exception as error:
            is_last = pause is None or connections[using].in_atomic_block
            if is_last or not _is_transient(error, using, since=session):
                raise
            # A second write does no harm, because the first removes the mark that it requires.
            unknown = unknown or not is_contention(error)
            connections[using].close_if_unusable_or_obsolete()
            time.sleep(pause or 0.0)
        else:
            return bool(written) or (unknown and _is_there(batch, pk, values))
    raise AssertionError("the last attempt returns or raises")


def _is_there(batch: Batch[Any], pk: Any, values: Values) -> bool:
    """Return whether the row has all values; a write whose answer was lost may be committed."""
    table = batch.question.table
    return table.filter(pk=pk, **constants_of(values)).exists()


def _is_transient(error: Exception, using: str, *, since: Any = None) -> bool:
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


def _not_written(batch: Batch[M], pk: Any, outcome: Outcome) -> Outcome:
    """Return the outcome of a row that no longer had this worker's mark."""
    table = batch.question.table
    # A query is needed, because the handler may have deleted its row.
    if table.filter(pk=pk).exists():
        return Lost(duration=getattr(outcome, "duration", None))
    if isinstance(outcome, Handled):
        writing.refuse_moved(batch.question, {pk: batch.rows[pk]}, batch.processor)
    return outcome


def _unsettled(
    batch: Batch[M], marked: MarkedRows, pk: Any, outcome: Outcome, error: Exception
) -> Outcome:
    """Record that the flip failed, so that the row is retried if its delivery allows that."""
    if not isinstance(outcome, Handled):
        _marked(batch).not_written[pk] = error
        _warn(batch, pk, "%s: row %s was not settled: %s", error)
        # The handler's own error, if any, explains more than the error of the settlement.
        return outcome if isinstance(outcome, Failed | Lost) else Failed(error)
    failed: Outcome = Failed(error, handled=True, duration=outcome.duration)
    if not marked.mark.is_lease or _is_transient(error, batch.question.using):
        return failed
    try:
        failed, values = _values(batch, marked, pk, failed)
        if values and not _write(batch, marked, pk, values):
            return _not_written(batch, pk, failed)
    except Exception as second:  # noqa: BLE001  # the first is the one to be reported
        _warn(batch, pk, "%s: row %s was not settled: %s", second)
    return failed


def put_back(batch: Batch[M], pk: Any) -> None:
    """Remove the mark from a row whose handler was not called, or may be called again."""
    try:
        release(batch, pk)
    except Exception as error:  # noqa: BLE001  # the others are to be put back all the same
        _warn(batch, pk, "%s: row %s was not put back: %s", error)


def _warn(batch: Batch[Any], pk: Any, message: str, error: Exception) -> None:
    name, attempt = batch.processor.name, batch.attempts.get(pk)
    extra = log_fields.fields(name, pk=pk, attempt=attempt, **log_fields.error_fields(error))
    log_fields.log(logger, logging.WARNING, message, name, str(pk), error, extra=extra)


def release(batch: Batch[M], pk: Any) -> bool:
    """Remove the mark from a row, as if it had not been claimed; return whether it was there."""
    marked = _marked(batch)
    return _write(batch, marked, pk, marked.put_back(pk))


def settle_ended(batch: Batch[M]) -> None:
    """Settle the rows whose handlers have ended, those with the same flip in one statement."""
    marked = _marked(batch)
    if len(marked.ended) > 1:
        _settle_together(batch, marked)
    while marked.ended:
        pk = next(iter(marked.ended))
        settle(batch, pk, marked.ended[pk])


def _settle_together(batch: Batch[M], marked: MarkedRows) -> None:
    """Flip the ended rows by as few statements as possible; leave the others in ``marked.ended``.

    Any error rolls back all of them; settling each row alone then finds the one to blame.
    """
    for values, expected, pks in _alike(batch, marked):
        if not _settle_alike(batch, marked, values, expected, pks):
            # The rows that were taken over, or are gone, are settled alone.
            ours = _still_held(batch, pks, expected)
            if 1 < len(ours) < len(pks):
                _settle_alike(batch, marked, values, expected, ours)


def _still_held(batch: Batch[Any], pks: Sequence[Any], expected: Expected) -> list[Any]:
    try:
        held = compare_and_set.held(batch.question, pks, expected)
    except Exception as error:
        if ends_the_run(error):
            raise
        return []  # settling each row alone retries transient errors
    return [pk for pk in pks if pk in held]


def _settle_alike(
    batch: Batch[M], marked: MarkedRows, values: Values, expected: Expected, pks: Sequence[Any]
) -> bool:
    """Flip rows by one statement, or none of them; return ``False`` if some of them were lost."""
    using = batch.question.using
    # Recorded before the write: if the answer is lost, the rows may still have been written. Rows
    # that an interrupted write before this one may have written stay recorded.
    unwritten = [pk for pk in pks if pk not in marked.maybe_written]
    marked.maybe_written.update(pks)
    session = connections[using].connection
    try:
        _flip_together(batch, pks, values, expected)
    except SomeRowsLostError:
        marked.maybe_written.difference_update(unwritten)
        return False
    except Exception as error:
        if ends_the_run(error):
            raise
        if not is_database_error(error) or was_answered(error, using, since=session):
            marked.maybe_written.difference_update(unwritten)
        name = batch.processor.name
        extra = log_fields.fields(name, row_count=len(pks), **log_fields.error_fields(error))
        message = "%s: settling rows one by one: %s"
        log_fields.log(logger, logging.DEBUG, message, name, error, extra=extra)
    else:
        # In this order: an interrupt in between settles the rows again, as perhaps written.
        for pk in pks:
            batch.outcomes[pk] = marked.ended[pk]
            del marked.ended[pk], marked.flips[pk]
        marked.maybe_written.difference_update(pks)
    return True


def _alike(batch: Batch[M], marked: MarkedRows) -> list[tuple[Values, Expected, list[Any]]]:
    """Return values, expected values and the keys of rows that one statement can write."""
    if marked.mark.option == "done":
        return []  # flipped before the work
    for pk, outcome in marked.ended.items():
        if isinstance(outcome, Handled):
            try:
                marked.flips[pk] = flip_of(batch, marked, pk, outcome)
            except BaseException as error:
                if ends_the_run(error):
                    raise
                # Settling that row alone raises the error again, as the row's failure.
    groups = grouping.group(marked.flips)
    for values, pks in groups:
        # The callables were called for these rows, and must not be called again.
        marked.flips.update(dict.fromkeys(pks, values))
    question, rehearsal = batch.question, batch.context.rehearsal
    if rehearsal is not None and not rehearsal.has_rules:
        groups = grouping.merge(groups, question.model, question.using, marked.mark.values)
    return [each for values, pks in groups for each in _by_mark(batch, values, pks)]


def _by_mark(
    batch: Batch[M], values: Values, pks: list[Any]
) -> Iterator[tuple[Values, Expected, list[Any]]]:
    """Yield the rows that are recognised by the same values, and the values to write to them."""
    if len(pks) > 1:
        expected = {pk: expected_of(batch, _marked(batch), pk) for pk in pks}
        for theirs, some in grouping.group(expected):
            if len(some) > 1:
                yield values, theirs, some


def _flip_together(batch: Batch[M], pks: Sequence[Any], values: Values, expected: Expected) -> None:
    question, processor = batch.question, batch.processor
    with settlement_transaction(question.using):
        # Race: lost lease that writes. A row that another worker has taken over does not match.
        if write_all(question, pks, expected, values) != len(pks):
            raise SomeRowsLostError
        if batch.context.needs_check("done"):
            writing.refuse_pending(processor, question, pks)


def was_answered(error: BaseException, using: str, *, since: Any) -> bool:
    """Return whether the database reported that nothing was written.

    ``since``: the driver's connection as it was before the error. Django itself reconnects if the
    ROLLBACK after a COMMIT without an answer finds that the session is gone.
    """
    connection: Any = connections[using]
    return is_contention(error) or (connection.connection is since and connection.is_usable())
