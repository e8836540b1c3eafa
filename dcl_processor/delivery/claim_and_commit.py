"""Claim rows and put a mark on them, committed before any handler is called."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from dcl_processor import log_fields, observers
from dcl_processor.candidates.question import these
from dcl_processor.clock import recognisable_columns
from dcl_processor.exceptions import InvalidDone, StillPending
from dcl_processor.execution.leftover import Leftover
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import ReadCommitted
from dcl_processor.locking.key_lock import claim_in_turn
from dcl_processor.settlement import rehearsal
from dcl_processor.values import Values

from . import one_statement
from .batch import Batch
from .lost_commit import is_committed_all_the_same
from .marks import Mark, MarkedRows, show

logger = logging.getLogger("dcl_processor")


def claim_and_commit(batch: Batch[Any], mark: Mark) -> None:
    """Lock the rows, check them again, mark the claimed ones, and commit."""
    question, context = batch.question, batch.context
    marked = batch.marked = MarkedRows(mark)
    if Leftover(question.using).end():
        name = batch.processor.name
        message = "%s: a transaction that a handler left open was rolled back"
        extra = log_fields.fields(name)
        log_fields.log(logger, logging.WARNING, message, name, extra=extra)
    began, session = time.monotonic(), connections[question.using].connection
    try:
        # The rehearsal with the first rows of a run needs a transaction. So does a mark that may
        # have to be rolled back.
        unproven = context.rehearsal is None or context.needs_check(mark.option)
        # A key is locked, and asked about, by statements of their own.
        key = batch.wanted.key
        at_once = key is None and not unproven and one_statement.suits(question)
        written = one_statement.claim_and_mark(batch, mark) if at_once else None
        if written is not None:
            _record(batch, marked, *written)
        else:
            # Race: work without flip. If this claim is rolled back, a settlement in its transaction
            # would be rolled back, too.
            batch.context.transactions.confirm()
            # Race: double claim. The mark is committed before any handler is called, and hides the
            # row from other workers after the lock is released.
            with ReadCommitted(question.using):
                batch.take((claim if key is None else claim_in_turn)(question, batch.wanted))
                batch.rehearse()
                _write(batch, marked)
                _check_marked(batch, mark)
    except BaseException as error:
        if not is_committed_all_the_same(batch, error, session=session):
            # An interrupt may come before or after the commit. A mark with a time shows later
            # whether it was committed, and whether it is still this worker's mark.
            if isinstance(error, Exception) or mark.time is None:
                marked.after.clear()
            raise
    marked.record_commit(batch, began)
    if observers.active and batch.rows:
        observers.tell("unlocked", batch.processor.name, time.monotonic() - began)


def _write(batch: Batch[Any], marked: MarkedRows) -> None:
    """Mark the rows in the transaction that holds their locks, and update the instances."""
    if not batch.rows:
        return
    question, values = batch.question, marked.mark.values
    names = list(values)
    rows = question.table.filter(these(batch.rows))
    before = _read(rows, names)
    rows.update(**values)
    # The values are read back, because the time is the database's, a column may store a value in
    # its own form, and generated columns may depend on it.
    computed = [f.attname for f in question.model._meta.concrete_fields if f.generated]
    after = _read(rows, [*names, *computed])
    for pk, row in batch.rows.items():
        show(row, after[pk])
    after = {pk: {name: read[name] for name in names} for pk, read in after.items()}
    _record(batch, marked, before, after)


def _record(
    batch: Batch[Any],
    marked: MarkedRows,
    before: Mapping[Any, Values],
    after: Mapping[Any, Values],
) -> None:
    """Record the old and the new values of the marked columns, and rows that lost the new ones.

    A trigger may keep the old value in some rows. Such a row is still pending, or cannot be
    recognised, so that its handler would be called in every run.
    """
    mark, retry, using = marked.mark, batch.processor.retry, batch.question.using
    rehearsed = batch.context.rehearsal
    constants = rehearsed.kept if rehearsed is not None else {}
    marked.before.update(recognisable_columns(before, using))
    marked.after.update(recognisable_columns(after, using))
    for pk, now in after.items():
        wrong = [name for name in constants.keys() & now.keys() if now[name] != constants[name]]
        if mark.time is not None and now[mark.time] in (None, before[pk][mark.time]):
            wrong.append(mark.time)
        if wrong:
            marked.not_kept[pk] = wrong[0]
        if retry is not None and retry.attempts is not None and retry.attempts in now:
            # Not the new value, which stops at the highest number of the column.
            batch.attempts[pk] = (before[pk][retry.attempts] or 0) + 1


def _check_marked(batch: Batch[Any], mark: Mark) -> None:
    """Raise if a mark leaves its row pending, where another worker would claim it.

    Under a lease raise if it does not, because no worker would take the row over.
    """
    option = mark.option
    if option is None or not batch.context.needs_check(option):
        return
    asked = batch.question.still_pending(list(batch.rows)).values_list("pk", flat=True)
    if mark.is_lease:
        still = set(asked)
        for pk in (pk for pk in batch.rows if pk not in still):
            raise InvalidDone(rehearsal.not_pending(batch.processor, pk))
        return
    for pk in asked[:1]:
        raise StillPending(rehearsal.still_pending(batch.processor, option, pk))


def _read(rows: QuerySet[Any], names: list[str]) -> dict[Any, Values]:
    found = rows.values_list("pk", *names)
    return {pk: dict(zip(names, values, strict=True)) for pk, *values in found}
