"""Call ``process_batch()`` outside any transaction, and settle the rows of each call together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor import log_fields
from dcl_processor.errors import represent
from dcl_processor.exceptions import TransactionLeftOpen
from dcl_processor.execution.handler import (
    Failed,
    Outcome,
    Together,
    attempt_together,
    not_prepared,
    prepare,
)
from dcl_processor.execution.leftover import Leftover
from dcl_processor.masking import shown

from .batch import Batch
from .marks import MarkedRows
from .settle import settle, settle_ended

M = TypeVar("M", bound=Model)

logger = logging.getLogger("dcl_processor")

#: Yields those of the rows, given by key, whose handler may start now.
Startable = Callable[[Iterable[Any]], Iterator[tuple[Any, M]]]


def handle_together(batch: Batch[M], marked: MarkedRows, startable: Startable[M]) -> None:
    """Call the handler with all rows that may start, after ``taken_over()`` with some of them.

    Rows that are to be called again, and may not start any more, are put back.
    """
    rows = _prepared(batch, startable, dict(startable(batch.rows)))
    again = _call(batch, marked, rows) if rows else []
    # The open resource may have caused the failure.
    if again and batch.context.resource.ready():
        for pk, row in startable(again):
            _call(batch, marked, {pk: row})


def left_by_others(batch: Batch[M], rows: Mapping[Any, M]) -> Mapping[Any, M]:
    """Return the rows whose ``taken_over()`` is to be called before the handler."""
    marked = batch.marked
    assert marked is not None
    if not batch.processor._prepares_taken_over:
        return {}
    return {pk: row for pk, row in rows.items() if marked.is_taken_over(pk)}


def after_preparation(
    startable: Startable[M], rows: Iterable[Any], left: Container[Any], prepared: Container[Any]
) -> Mapping[Any, M]:
    """Return the rows to call the handler with, after ``taken_over()``.

    ``left``: the rows whose ``taken_over()`` was to be called; ``prepared``: those for which it
    has returned.
    """
    # Race: double claim. A lease may have lapsed during these calls.
    return dict(startable(pk for pk in rows if pk not in left or pk in prepared))


def _prepared(batch: Batch[M], startable: Startable[M], rows: Mapping[Any, M]) -> Mapping[Any, M]:
    """Call ``taken_over()`` with the rows of other workers; return the rows for the handler."""
    left = left_by_others(batch, rows)
    if not left:
        return rows
    prepared = set()
    for pk, row in startable(left):
        batch.context.in_flight.note([pk])
        with Leftover(batch.question.using) as leftover:
            refused = prepare(batch.processor, row, batch.context.time_limit)
        if leftover.end() and refused is None:
            refused = not_prepared(TransactionLeftOpen())
        if refused is None:
            prepared.add(pk)
        else:
            settle(batch, pk, refused)
    return after_preparation(startable, rows, left, prepared)


def _call(batch: Batch[M], marked: MarkedRows, rows: Mapping[Any, M]) -> list[Any]:
    """Call the handler and settle its rows; return those that are to be called again."""
    context = batch.context
    arguments = context.resource.arguments()
    context.in_flight.note(rows)
    with Leftover(batch.question.using) as leftover:
        # As late as possible, because AT_MOST_ONCE does not put a started row back.
        batch.started.update(rows)
        ended = attempt_together(batch.processor, rows, arguments, context.time_limit)
    outcomes, again = outcomes_and_again(batch, marked, rows, ended)
    # Race: work without flip. The work is done; after an interrupt the rows are settled from here.
    marked.ended.update(leftover.judge_all(outcomes))
    if again or any(isinstance(each, Failed) for each in marked.ended.values()):
        context.resource.reopen_later()
    settle_ended(batch)
    return again


def outcomes_and_again(
    batch: Batch[Any], marked: MarkedRows, rows: Mapping[Any, Any], ended: Together
) -> tuple[dict[Any, Outcome], list[Any]]:
    """Return the outcomes of a call's rows, and the rows that are to be called again, each alone.

    If the call raised, it is unknown which of its rows caused the error, and which of them were
    handled before it.
    """
    if isinstance(ended, dict):
        return ended, []
    # Race: poison row. Each row is called alone, so that one fails and the others are done. Only a
    # delivery that may repeat work allows that.
    if marked.mark.is_lease and len(rows) > 1:
        if isinstance(ended, Failed):
            # In no report, if the run has to stop before the rows are called alone.
            name = batch.processor.name
            log_fields.log(
                logger,
                logging.WARNING,
                "%s: a call of process_batch() for %d rows raised, and each row is to be handled "
                "alone: %s",
                name,
                len(rows),
                shown(represent(ended.error)),
                extra=log_fields.fields(
                    name,
                    row_count=len(rows),
                    duration=ended.duration,
                    **log_fields.error_fields(ended.error),
                ),
            )
        return {}, [*rows]
    return dict.fromkeys(rows, ended), []
