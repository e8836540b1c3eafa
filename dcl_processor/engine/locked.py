"""The steps of a delivery in one transaction: claim, work, commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dcl_processor.engine import bookkeeping
from dcl_processor.engine.context import Context, read_attempts
from dcl_processor.engine.failing import log_refused
from dcl_processor.engine.rows import Batch, Row
from dcl_processor.engine.verify import verify
from dcl_processor.report.errors import raise_interrupt
from dcl_processor.report.exceptions import SessionLost, StillPending
from dcl_processor.report.outcomes import Failed, Handled, Outcome
from dcl_processor.report.values import Values
from dcl_processor.sql.errors import is_contention
from dcl_processor.sql.savepoint import RowSavepoint
from dcl_processor.sql.steps import Write


def claim(run: Context, batch: Batch) -> None:
    """Open a transaction, and lock the rows of a batch that are still pending in it."""
    question = batch.question
    claimed = run.session.claim(question, batch.wanted)
    batch.rows = [Row(pk, instance) for pk, instance in claimed.rows.items()]
    run.source.note_claim(batch, claimed)
    if not batch.rows:
        return
    if run.processor.retry is not None:
        read_attempts(run.processor.retry, question, batch.rows)
    if question.model not in run.processor._identity.verified:
        verify(run.processor, run.session, question, batch.rows[0])


def handle_locked(run: Context, batch: Batch) -> None:
    """Handle the claimed rows one by one, so that the failure of one does not undo the others."""
    if len(batch.rows) > 1 and run.handler.is_batch:
        _handle_together(run, batch)
        return
    # Other rows' work, or a note about the row, must survive its failure.
    savepoint = run.session.savepoint()
    try:
        for place, row in enumerate(batch.rows):
            if batch.ended and not (run.may_go_on(batch) and run.resource.ready()):
                batch.ended += [(each, None) for each in batch.rows[place:]]
                break
            batch.ended.append((row, row.refused or _handle(run, batch, row, savepoint)))
    finally:
        savepoint.end()
        run.notes.note([])  # the next row's note takes the place of the one before


def _handle(run: Context, batch: Batch, row: Row, savepoint: RowSavepoint) -> Outcome:
    savepoint.begin()
    batch.started.append(row)
    run.notes.note([row.pk])
    result = run.handler.call([row], run.resource.arguments, run.announce([row]))
    given: Any = result[row.pk] if isinstance(result, Mapping) else result
    outcome = _with_flip(run, batch, row, given)
    try:
        # After each row, so that this row is the one that ended the transaction.
        run.session.check()
        outcome = savepoint.close(outcome)
    except Exception as error:
        batch.to_blame = None if isinstance(error, SessionLost) else row
        if isinstance(outcome, Failed):
            if is_contention(outcome.error):
                batch.to_blame = None  # a deadlock, by which MariaDB has ended the transaction
            raise outcome.error from None  # what the handler has raised comes first
        raise
    if isinstance(outcome, Failed):
        run.resource.is_stale = True
    return outcome


def _with_flip(run: Context, batch: Batch, row: Row, outcome: Outcome) -> Outcome:
    """Compute the flip of a row that was handled, whose error is the failure of this row alone."""
    if type(outcome) is not Handled:
        return outcome
    try:
        if row.instance.pk != row.pk:
            bookkeeping.refuse_moved(run.processor, row, batch.question.table)
        given = outcome.result
        row.flip = run.fixed_flip or bookkeeping.flip(run.processor, row.instance, given)
    except Exception as error:  # noqa: BLE001  # of the user's function
        raise_interrupt(error)
        log_refused(run.processor, row, outcome.result, error)
        return Failed(error, handled=True, duration=outcome.duration)
    return outcome


def _handle_together(run: Context, batch: Batch) -> None:
    """Call ``process_batch()``; raises if nothing of the batch can be kept."""
    batch.ended = [(row, row.refused) for row in batch.rows if row.refused is not None]
    rows = [row for row in batch.rows if row.refused is None]
    if not rows or not run.resource.ready():
        batch.ended += [(row, None) for row in rows]
        return
    if run.unproven:
        batch.ended += [(row, None) for row in rows[1:]]
        rows = rows[:1]
    batch.started += rows
    # Race: double claim. Behind a savepoint the rows' locks outlive an error that is caught.
    savepoint = run.session.savepoint()
    run.notes.note([row.pk for row in rows])
    try:
        result = run.handler.call(rows, run.resource.arguments, run.announce(rows))
    finally:
        savepoint.end()
        run.notes.note([])
    run.session.check()
    if not isinstance(result, Mapping):
        run.resource.is_stale = True
        raise Together(result)
    kept = savepoint.close(Handled())
    if isinstance(kept, Failed):
        raise kept.error
    batch.ended += [(row, _with_flip(run, batch, row, result[row.pk])) for row in rows]
    if any(isinstance(each, Failed) for each in result.values()):
        run.resource.is_stale = True


class Together(Exception):
    """A call of ``process_batch()`` for several rows has raised; each is to be handled alone."""


def commit(run: Context, batch: Batch) -> None:
    """Write the flips of the rows that were handled, and notes of the others, and commit."""
    # Race: flip without work. The work of a row whose handler raised was rolled back.
    session, question = run.session, batch.question
    handled = [row for row, each in batch.ended if type(each) is Handled]
    noted = []
    for place, (row, outcome) in enumerate(batch.ended):
        if outcome is not None and type(outcome) is not Handled:
            final, values = bookkeeping.notes(run.processor, row, outcome)
            batch.ended[place] = row, final
            noted += [Write(values, [row.pk])] if values else []
    if not (noted or any(each is not None and each.kept for _, each in batch.ended)):
        session.rollback()
        return
    batch.is_committing = True
    try:
        session.commit(question, [*_flips(run, handled), *noted])
    except bookkeeping.UNWRITABLE as error:
        raise bookkeeping.invalid_done(run.processor.name, error) from error
    except StillPending as error:
        batch.to_blame = next((row for row in handled if row.pk == error.pk), None)
        raise


def _flips(run: Context, handled: Sequence[Row]) -> list[Write]:
    """Return what to write to the handled rows; rows with the same values are one write."""
    found: dict[Any, tuple[Values, list[Any]]] = {}
    for row in handled:
        key = None if row.flip is run.fixed_flip else bookkeeping.likeness(row.flip)
        found.setdefault(key, (row.flip, []))[1].append(row.pk)
    return [Write(values, pks, asks=True) for values, pks in found.values()]
