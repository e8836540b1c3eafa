"""One way to fail: roll back, redo the rows one by one, and record the error of a single row."""

from __future__ import annotations

import logging
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from dcl_processor.engine import bookkeeping
from dcl_processor.engine.context import Context
from dcl_processor.engine.rows import Batch, Row
from dcl_processor.options.options import Definition
from dcl_processor.report.errors import raise_interrupt
from dcl_processor.report.exceptions import InsideTransaction
from dcl_processor.report.log import log
from dcl_processor.report.outcomes import Failed, Handled, Outcome
from dcl_processor.sql.errors import (
    CANCELLED,
    code_of,
    is_back,
    is_contention,
    is_database_error,
    is_passing,
    reconnected,
)
from dcl_processor.sql.steps import Write


def isolate(run: Context, batch: Batch, error: Exception) -> None:
    """Find out which row of a batch is at fault; raise if no row can be."""
    session = run.session
    session.rollback()
    if batch.is_committing and is_database_error(error) and session.was_committed():
        handled = [row.pk for row, ended in batch.ended if type(ended) is Handled]
        if not (handled and batch.question.still_pending(handled).exists()):
            # Only the answer to the COMMIT was lost; a handler's own COMMIT would leave it pending.
            run.count(batch)
            return
    if isinstance(error, ImproperlyConfigured | InsideTransaction) and not batch.started:
        raise error  # every row would meet it
    if not is_back(session.using):
        session.connection.ensure_connection()  # it says why there is no session
    _blame(run, batch)
    pks = [row.pk for row in batch.rows] or [*batch.wanted.pks]
    # A lock is another session's, and passes; what else comes back may be one row's.
    is_whole = len(pks) == 1 or is_contention(error)
    if not batch.started and is_whole and is_passing(error) and code_of(error) != CANCELLED:
        message = "%s: a claim was not answered, and is tried again later: %s"
        log(logging.WARNING, message, run.processor.name, error)
        run.source.missed(pks)
    elif len(pks) > 1:
        run.counters.counts["redone"] += len(batch.started)
        run.source.redo(pks)
    else:
        _fail(run, batch, pks[0], error)


def _blame(run: Context, batch: Batch) -> None:
    """Leave only the row in a batch that is known to be at fault; the others are redone."""
    if len(batch.started) == 1:
        batch.to_blame = batch.started[0]
    if batch.to_blame is not None and len(batch.rows) > 1:
        again = [str(row.pk) for row in batch.started if row is not batch.to_blame]
        run.counters.counts["redone"] += len(again)
        if again:
            message = "%s: the handler of row %s ended the transaction, or its flip was refused; "
            message += "these other rows are handled again: %s"
            blamed = str(batch.to_blame.pk)
            known: dict[str, Any] = {"pk": blamed, "row_count": len(again)}
            log(logging.WARNING, message, run.processor.name, blamed, ", ".join(again), **known)
        run.source.redo([row.pk for row in batch.rows if row is not batch.to_blame])
        batch.wanted, batch.rows = batch.wanted.only(batch.to_blame.pk), [batch.to_blame]


def _fail(run: Context, batch: Batch, pk: Any, error: Exception) -> None:
    """Count a single row as failed, and record that in a transaction of its own."""
    row = batch.rows[0] if batch.rows else None
    started = row is not None and row in batch.started
    outcome: Any = Failed(error, handled=started, unstarted=not started)
    refused: Exception | None = None
    for _, ended in [each for each in batch.ended if each[0] is row]:
        if type(ended) is Handled:
            log_refused(run.processor, row, ended.result, error)
        elif ended is not None and is_database_error(error):
            outcome, refused = ended, error  # only its record was refused
    if row is not None and started and run.notes_failures:
        outcome = _recorded(run, batch, row, outcome, refused)
    run.source.end([pk], [pk])
    run.tally(pk, outcome)
    run.resource.is_stale = True


def log_refused(processor: Definition[Any], row: Row | None, result: Any, error: Exception) -> None:
    """Log what a handler has returned, because the flip that would have kept it was refused."""
    message = "%s: row %s was handled, with the result %s, and its flip was refused: %s"
    pk = row.pk if row is not None else ""
    log(logging.WARNING, message, processor.name, str(pk), f"{result!r:.200}", error, pk=pk)


def _recorded(
    run: Context, batch: Batch, row: Row, outcome: Outcome, refused: Exception | None
) -> Any:
    """Write what belongs to a failure; ``refused``: why the database refused it before."""
    try:
        claimed = run.session.claim(batch.question, batch.wanted.only(row.pk))
        if row.pk not in claimed.rows:
            run.session.rollback()
            return outcome  # it was changed, or locked, meanwhile
        final, values = bookkeeping.notes(run.processor, row, outcome)
        if refused is not None and (plain := bookkeeping.in_plain_text(run.processor, values)):
            values = plain
            about = (run.processor.name, str(row.pk), refused)
            log(logging.WARNING, bookkeeping.PLAIN, *about, pk=row.pk)
        run.session.commit(batch.question, [Write(values, [row.pk])] if values else [])
    except Exception as error:  # noqa: BLE001  # the row is as it was, and the run goes on
        run.session.rollback()
        raise_interrupt(error)
        message = "%s: the failure of row %s could not be recorded: %s"
        log(logging.WARNING, message, run.processor.name, str(row.pk), error, pk=row.pk)
        reconnected(run.session.using)
        return outcome
    return final
