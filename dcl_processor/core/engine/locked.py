"""The steps of a delivery in one transaction: claim, work, commit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dcl_processor.core.engine import bookkeeping
from dcl_processor.core.engine.context import Context, read_attempts, refuse_wrong_flips
from dcl_processor.core.engine.joining import keep_flips, may_keep, with_kept
from dcl_processor.core.engine.rows import Batch, Row
from dcl_processor.core.engine.savepoint import RowSavepoint, asked_for_rollback
from dcl_processor.core.engine.verify import left_pending, verify
from dcl_processor.core.report import events
from dcl_processor.core.report.exceptions import SessionLost
from dcl_processor.core.report.outcomes import Failed, Handled, Outcome


def claim(run: Context, batch: Batch) -> None:
    """Open a transaction, and lock the rows of a batch that are still pending in it."""
    claimed = with_kept(run, batch, partial(run.session.claim, batch.question, batch.wanted))
    if claimed is None:
        return
    batch.rows = [Row(pk, instance) for pk, instance in claimed.rows.items()]
    run.source.note_claim(batch, claimed)
    if not batch.rows:
        return
    events.tell(events.claimed, run.processor, pks=[*claimed.rows])
    read_attempts(run, batch.question, batch.rows)
    refuse_wrong_flips(run, batch.rows)
    if not run.is_verified:
        verify(run.processor, run.session, batch.question, batch.rows[0])
        run.is_verified = True


def handle_locked(run: Context, batch: Batch) -> None:
    """Handle the claimed rows one by one, so that the failure of one does not undo the others."""
    several = len(batch.rows) > 1
    if several and run.handler.is_batch:
        _handle_together(run, batch)
        return
    # Other rows' work, or a note about the row, must survive its failure.
    shared = True
    savepoint = RowSavepoint(run.session.connection) if shared else None
    try:
        for place, row in enumerate(batch.rows):
            if not run.may_go_on(batch) or not run.resource.ready():
                batch.ended += [(each, None) for each in batch.rows[place:]]
                break
            batch.ended.append((row, row.refused or _handle(run, batch, row, savepoint)))
    finally:
        if savepoint is not None:
            savepoint.end()


def _handle(run: Context, batch: Batch, row: Row, savepoint: RowSavepoint | None) -> Outcome:
    if savepoint is not None:
        savepoint.begin()
    batch.started.append(row)
    run.notes.note([row.pk])
    result = run.handler.call([row], run.resource.arguments)
    outcome: Outcome = result[row.pk] if isinstance(result, Mapping) else result  # type: ignore[assignment]
    try:
        # After each row, so that this row is the one that ended the transaction.
        run.session.check()
        if savepoint is not None:
            outcome = savepoint.close(outcome)
        else:
            outcome = asked_for_rollback(run.session.connection, outcome)
    except Exception as error:
        was_ended = isinstance(error.__cause__, SessionLost)
        batch.to_blame = None if was_ended else row
        if isinstance(outcome, Failed):
            raise outcome.error from None  # what the handler has raised comes first
        raise
    if isinstance(outcome, Failed):
        run.resource.reopen_later()
    return outcome


def _handle_together(run: Context, batch: Batch) -> None:
    """Call ``process_batch()``; raises if nothing of the batch can be kept."""
    batch.ended = [(row, row.refused) for row in batch.rows if row.refused is not None]
    rows = [row for row in batch.rows if row.refused is None]
    if not rows or not run.resource.ready():
        batch.ended += [(row, None) for row in rows]
        return
    batch.started += rows
    run.notes.note([row.pk for row in rows])
    result = run.handler.call(rows, run.resource.arguments)
    run.session.check()
    if not isinstance(result, Mapping):
        run.resource.reopen_later()
        raise Together(result)
    kept = asked_for_rollback(run.session.connection, Handled())
    if isinstance(kept, Failed):
        raise kept.error
    batch.ended += [(row, result[row.pk]) for row in rows]
    if any(isinstance(each, Failed) for each in result.values()):
        run.resource.reopen_later()


class Together(Exception):
    """A call of ``process_batch()`` for several rows has raised; each is to be handled alone."""


def commit(run: Context, batch: Batch) -> None:
    """Write the flips of the rows that were handled, and notes of the others, and commit."""
    # Race: flip without work. The work of a row whose handler raised was rolled back.
    session, question = run.session, batch.question
    handled = [(row, each.result) for row, each in batch.ended if type(each) is Handled]
    noted = []
    for place, (row, outcome) in enumerate(batch.ended):
        if outcome is not None and type(outcome) is not Handled:
            final, values = bookkeeping.noted(run.processor, row, outcome)
            batch.ended[place] = row, final
            noted += [(values, [row.pk])] if values else []
    for row in [row for row, _ in handled if row.instance.pk != row.pk]:
        bookkeeping.refuse_moved(run.processor, row, question.table)
    is_kept = handled or noted or any(getattr(each, "kept", False) for _, each in batch.ended)
    if not is_kept:
        session.rollback()
        return
    writes = bookkeeping.flips(run.processor, handled, run.fixed_flip)
    pks = [row.pk for row, _ in handled]
    if run.is_unproven and handled:
        # The flip could not be tried before the handler.
        session.write(question, writes)
        for pk in question.still_pending(pks).values_list("pk", flat=True)[:1]:
            raise left_pending(run.processor, pk)
        run.is_unproven, writes = False, []
    if not noted and writes and may_keep(run):
        keep_flips(run, batch, pks, run.session.flips(question, writes))
        return
    batch.is_committing = True
    session.commit(question, [*writes, *noted])
    run.note_handled(pks)
