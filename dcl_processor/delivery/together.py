"""Call ``process_batch()`` outside any transaction, and settle the rows of each call together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.execution.handler import Failed, Outcome, Together, attempt_together
from dcl_processor.execution.leftover import Leftover

from .batch import Batch
from .marks import MarkedRows
from .settle import settle_ended

M = TypeVar("M", bound=Model)

#: Yields those of the rows, given by key, whose handler may start now.
Startable = Callable[[Iterable[Any]], Iterator[tuple[Any, M]]]


def handle_together(batch: Batch[M], marked: MarkedRows, startable: Startable[M]) -> None:
    """Call the handler with all rows that may start.

    Rows that are to be called again, and may not start any more, are put back.
    """
    rows = dict(startable(batch.rows))
    again = _call(batch, marked, rows) if rows else []
    # The open resource may have caused the failure.
    if again and batch.context.resource.ready():
        for pk, row in startable(again):
            _call(batch, marked, {pk: row})


def _call(batch: Batch[M], marked: MarkedRows, rows: Mapping[Any, M]) -> list[Any]:
    """Call the handler and settle its rows; return those that are to be called again."""
    context = batch.context
    arguments = context.resource.arguments()
    context.in_flight.note(rows)
    with Leftover(batch.question.using) as leftover:
        # As late as possible, because AT_MOST_ONCE does not put a started row back.
        batch.started.update(rows)
        ended = attempt_together(batch.processor, rows, arguments)
    outcomes, again = outcomes_and_again(marked, rows, ended)
    # Race: work without flip. The work is done; after an interrupt the rows are settled from here.
    marked.ended.update(leftover.judge_all(outcomes))
    if again or any(isinstance(each, Failed) for each in marked.ended.values()):
        context.resource.worn()
    settle_ended(batch)
    return again


def outcomes_and_again(
    marked: MarkedRows, rows: Mapping[Any, Any], ended: Together
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
        return {}, [*rows]
    return dict.fromkeys(rows, ended), []
