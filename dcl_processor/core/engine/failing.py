"""One way to fail: roll back, redo the rows one by one, and record the error of a single row."""

from __future__ import annotations

import logging
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import Error

from dcl_processor.core.engine import bookkeeping
from dcl_processor.core.engine.context import Context
from dcl_processor.core.engine.rows import Batch, Row
from dcl_processor.core.report.counters import log
from dcl_processor.core.report.outcomes import Failed
from dcl_processor.core.report.values import Values
from dcl_processor.core.sql.errors import is_contention, is_database_error, reconnected
from dcl_processor.core.sql.session import Wanted


def isolate(run: Context, batch: Batch, error: Exception) -> None:
    """Find out which row of a batch is at fault; raise if no row can be."""
    session = run.session
    session.rollback()
    may_be = batch.is_committing and is_database_error(error) and session.was_committed()
    if may_be and not batch.question.still_pending([row.pk for row in batch.rows]).exists():
        # Only the answer to the COMMIT was lost; a handler's own COMMIT would leave it pending.
        run.count(batch)
        return
    if isinstance(error, ImproperlyConfigured) and not batch.started:
        raise error  # every row would meet it
    _reconnect(run, error)
    if batch.to_blame is not None and len(batch.rows) > 1:
        run.counters.counts["redone"] += len(batch.started) - 1
        run.source.redo([row.pk for row in batch.rows if row is not batch.to_blame])
        batch.wanted, batch.rows = Wanted([batch.to_blame.pk], 1), [batch.to_blame]
    pks = [row.pk for row in batch.rows] or [*batch.wanted.pks]
    if not batch.started and is_database_error(error) and is_contention(error):
        run.source.missed(pks)  # another session has the locks: they are tried later
    elif len(pks) > 1:
        run.counters.counts["redone"] += len(batch.started)
        run.source.redo(pks)
    else:
        _fail(run, batch, pks[0], error)


def _reconnect(run: Context, error: Exception) -> None:
    """Raise the error unless there is a session, or a new one."""
    connection = run.session.connection
    if connection.in_atomic_block:
        return  # Django's TestCase
    try:
        if connection.connection is not None and not connection.is_usable():
            connection.close()
        connection.ensure_connection()
    except Error:
        raise error from None


def _fail(run: Context, batch: Batch, pk: Any, error: Exception) -> None:
    """Count a single row as failed, and record that in a transaction of its own."""
    row = batch.rows[0] if batch.rows else None
    started = row is not None and row in batch.started
    outcome: Any = Failed(error, handled=started, unstarted=not started)
    if row is not None and started and run.notes_failures:
        outcome = _recorded(run, batch, row, outcome)
    run.source.end([pk])
    run.counters.count(pk, outcome)
    run.resource.reopen_later()


def _recorded(run: Context, batch: Batch, row: Row, outcome: Failed) -> Any:
    """Write what belongs to a failure, or less of it; return the outcome to report."""
    final, values = bookkeeping.noted(run.processor, row, outcome)
    first: Exception | None = None
    for some in bookkeeping.reduced(run.processor, values):
        try:
            claimed = run.session.claim(batch.question, batch.wanted)
            if row.pk not in claimed.rows:
                run.session.rollback()
                return outcome  # it was changed, or locked, meanwhile
            run.session.commit(batch.question, [(some, [row.pk])])
        except Exception as refused:  # noqa: BLE001  # less is tried, and in the end nothing
            run.session.rollback()
            first = first or refused
            reconnected(run.session.using)
        else:
            if first is not None:
                tell_of_less(run, row, values, some, first)
            return final
    message = "%s: the failure of row %s could not be recorded: %s"
    log(logging.WARNING, message, run.processor.name, str(row.pk), first)
    return outcome


def tell_of_less(run: Context, row: Row, values: Values, some: Values, error: Exception) -> None:
    """Log which values of a failure could not be stored."""
    left_out = ", ".join(sorted(values.keys() - some.keys()))
    what = f"without {left_out}" if left_out else "with a plain text"
    message = "%s: the failure of row %s was recorded %s, because the database refused it: %s"
    log(logging.WARNING, message, run.processor.name, str(row.pk), what, error)
