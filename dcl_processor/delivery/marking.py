"""Claim rows and put a mark on them, committed before any handler is called."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from django.db.models import QuerySet

from dcl_processor.candidates.pending import these
from dcl_processor.exceptions import StillPending
from dcl_processor.locking.claiming import claim
from dcl_processor.locking.isolation import row_transaction
from dcl_processor.settlement import rehearsal

from . import one_statement
from .batch import Batch
from .marks import Mark, Values


def claim_and_mark(batch: Batch[Any], mark: Mark) -> None:
    """Lock the rows, check them again, mark the claimed ones, and commit."""
    began = time.monotonic()
    question, run = batch.question, batch.run
    try:
        # The rehearsal with the first rows of a run needs a transaction. So does a mark that may
        # have to be rolled back.
        doubtful = not run.rehearsed or mark.leaves_by in run.doubtful
        at_once = not doubtful and one_statement.suits(question)
        marked = one_statement.claim_and_mark(batch, mark) if at_once else None
        if marked is not None:
            _carried(batch, mark, *marked)
        else:
            # Race: double claim. The mark is committed before any handler is called, and hides the
            # row from other workers after the lock is released.
            with row_transaction(question.using):
                batch.claimed(claim(question, batch.pks, batch.most))
                run.rehearse(question, batch.rows)
                _write(batch, mark)
                _refuse_pending(batch, mark)
    except BaseException as error:
        # An interrupt may come before or after the commit. A unique mark shows later whether it
        # was committed, and whether it is still this worker's mark.
        if isinstance(error, Exception) or not mark.is_unique:
            mark.forget()
        raise
    mark.hold(began)


def _write(batch: Batch[Any], mark: Mark) -> None:
    """Mark the rows in the transaction that holds their locks, and update the instances."""
    if not batch.rows:
        return
    question, names = batch.question, list(mark.values)
    table = question.table
    marked = table.filter(these(batch.rows))
    before = _read(marked, names)
    marked.update(**mark.values)
    # The values are read back, because the time is the database's, a column may store a value in
    # its own form, and generated columns may depend on it.
    computed = [f.attname for f in question.model._meta.concrete_fields if f.generated]
    after = _read(marked, [*names, *computed])
    for pk, row in batch.rows.items():
        show(row, after[pk])
    _carried(batch, mark, before, {pk: {n: says[n] for n in names} for pk, says in after.items()})


def _carried(
    batch: Batch[Any], mark: Mark, before: Mapping[Any, Values], after: Mapping[Any, Values]
) -> None:
    """Record the old and the new values of the marked columns, and rows that lost the new ones.

    A trigger may keep the old value in some rows. Such a row is still pending, or cannot be
    recognised, so that its handler would be called in every run.
    """
    mark.carried(before, after)
    constants = batch.run.kept
    for pk, now in after.items():
        wrong = [name for name in constants.keys() & now.keys() if now[name] != constants[name]]
        wrong += [name for name in mark.times if now[name] in (None, before[pk][name])]
        if wrong:
            batch.not_kept[pk] = wrong[0]


def _refuse_pending(batch: Batch[Any], mark: Mark) -> None:
    """Raise if a mark leaves its row pending, where another worker would claim it."""
    option = mark.leaves_by
    if option is not None and option in batch.run.doubtful:
        for pk in batch.question.still_pending(list(batch.rows)).values_list("pk", flat=True)[:1]:
            raise StillPending(rehearsal.still_pending(batch.processor, option, pk))


def _read(rows: QuerySet[Any], names: list[str]) -> dict[Any, Values]:
    found = rows.values_list("pk", *names)
    return {pk: dict(zip(names, values, strict=True)) for pk, *values in found}


def show(row: Any, values: Values) -> None:
    """Copy the row's values to the instance, so that the handler's ``save()`` keeps them.

    Fields that the user's queryset deferred stay deferred.
    """
    deferred = row.get_deferred_fields()
    for name, value in values.items():
        if name not in deferred:
            setattr(row, name, value)
