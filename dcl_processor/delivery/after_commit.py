"""Handle rows with no transaction open, and settle each row if its mark is still there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.database.connection import is_connected
from dcl_processor.exceptions import AttemptsUsedUp, ProcessorError
from dcl_processor.execution.handler import Failed, Lost, Outcome, execute
from dcl_processor.execution.leftover import Leftover

from .async_handlers import AsyncHandlers
from .batch import Batch
from .marks import MarkedRows
from .settle import put_back, settle, settle_ended
from .settle_later import settle_later

M = TypeVar("M", bound=Model)


def handle_and_settle(batch: Batch[M]) -> None:
    """Handle the claimed rows; each is settled as soon as its outcome is known.

    The settlement of the last one may wait for the next claim.
    Asynchronous handlers are only started; ``batch.handlers`` goes on with them.
    """
    marked, loop = batch.marked, batch.context.event_loop
    assert marked is not None
    if marked.not_kept:
        _refuse_not_kept(batch, marked)
    refused: list[tuple[Any, Outcome]] = []
    rows = _startable(batch, marked, refused)
    if loop is not None:
        batch.handlers = AsyncHandlers(batch, loop, rows, refused)
        batch.handlers.go_on()
        return
    processor, resource = batch.processor, batch.context.resource
    last, prepares = next(reversed(batch.rows), None), processor._prepares_taken_over
    for pk, row in rows:
        arguments = resource.arguments()
        is_taken_over = prepares and marked.is_taken_over(pk)
        with Leftover(batch.question.using) as leftover:
            # As late as possible, because AT_MOST_ONCE does not put a started row back.
            batch.started.add(pk)
            outcome = execute(processor, row, arguments, is_taken_over=is_taken_over)
        outcome = leftover.judge(outcome)
        if isinstance(outcome, Failed):
            resource.worn()
        if pk != last or refused or not settle_later(batch, pk, outcome):
            settle(batch, pk, outcome)
    for pk, outcome in refused:
        settle(batch, pk, outcome)


def _refuse_not_kept(batch: Batch[M], marked: MarkedRows) -> None:
    """Put back the rows in which a column does not contain what the claim wrote to it."""
    for pk, column in marked.not_kept.items():
        batch.outcomes[pk] = Failed(
            ProcessorError(
                f"{batch.processor.name}: expected {column!r} of row {pk} to contain what the "
                "claim wrote, got another value, so the handler was not called; look for a "
                "trigger that restores the old value."
            )
        )
        put_back(batch, pk)


def _startable(
    batch: Batch[M], marked: MarkedRows, refused: list[tuple[Any, Outcome]]
) -> Iterator[tuple[Any, M]]:
    """Yield each row when its handler may start; add the rows that may not to ``refused``."""
    context, retry = batch.context, batch.processor.retry
    for pk, row in batch.rows.items():
        if pk in marked.not_kept:
            continue
        # A handler may have lost the session. The next handler must not begin with a dead
        # connection, and rows that cannot start are put back.
        if not context.may_start(batch.outcomes) or not is_connected(batch.question.using):
            return
        if retry and batch.attempts[pk] > retry.max_attempts:
            refused.append((pk, Failed(AttemptsUsedUp(retry.max_attempts))))
        elif context.heartbeat is not None and not context.heartbeat.is_ours(pk):
            # Race: double claim. Another worker may handle a row whose lease has lapsed.
            refused.append((pk, Lost(called=False)))
        else:
            yield pk, row


def clear_up(batch: Batch[M]) -> None:
    """Settle rows that ended during an interrupt, and put back rows that were not started."""
    marked = batch.marked
    assert marked is not None
    if marked.ended:
        settle_ended(batch)
    for pk in [pk for pk in marked.after if pk not in batch.outcomes]:
        if marked.mark.is_lease or pk not in batch.started:
            put_back(batch, pk)
