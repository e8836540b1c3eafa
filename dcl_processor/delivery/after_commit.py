"""Handle rows with no transaction open, and settle each row if its mark is still there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from django.db.models import Model

from dcl_processor.database.connection import is_connected
from dcl_processor.exceptions import AttemptsUsedUp, ProcessorError
from dcl_processor.execution.handler import Failed, HandedOut, Lost, Outcome, UsedUp, execute
from dcl_processor.execution.leftover import Leftover

from .async_handlers import AsyncHandlers
from .batch import Batch
from .marks import MarkedRows
from .settle import put_back, settle, settle_ended
from .settle_later import settle_later
from .together import handle_together

M = TypeVar("M", bound=Model)


def handle_and_settle(batch: Batch[M]) -> None:
    """Handle the claimed rows; each is settled as soon as its outcome is known.

    The settlement of the last one may wait for the next claim. The rows that ``process_batch()``
    handles in one call are settled together.
    Asynchronous handlers are only started; ``batch.handlers`` goes on with them.
    """
    marked, loop = batch.marked, batch.context.event_loop
    assert marked is not None
    if marked.not_kept:
        _refuse_not_kept(batch, marked)
    refused: list[tuple[Any, Outcome]] = []
    startable = partial(_startable, batch, marked, refused)
    if batch.context.hand_over is not None:
        _hand_over(batch, batch.context.hand_over, startable(batch.rows))
    elif loop is not None:
        batch.handlers = AsyncHandlers(batch, loop, startable, refused)
        batch.handlers.go_on()
        return
    elif batch.processor._handles_batches:
        handle_together(batch, marked, startable)
    else:
        _handle_each(batch, marked, startable(batch.rows), refused)
    for pk, outcome in refused:
        settle(batch, pk, outcome)


def _handle_each(
    batch: Batch[M],
    marked: MarkedRows,
    rows: Iterable[tuple[Any, M]],
    refused: list[tuple[Any, Outcome]],
) -> None:
    processor, resource = batch.processor, batch.context.resource
    limit, in_flight = batch.context.time_limit, batch.context.in_flight
    last, prepares = next(reversed(batch.rows), None), processor._prepares_taken_over
    for pk, row in rows:
        arguments = resource.arguments()
        still_ours = None
        if prepares and marked.is_taken_over(pk):
            still_ours = partial(batch.is_ours, pk)
        with Leftover(batch.question.using) as leftover:
            # As late as possible, because AT_MOST_ONCE does not put a started row back.
            batch.started.add(pk)
            if in_flight.notes.using is not None:
                in_flight.note([pk])
            attempt = batch.attempts.get(pk)
            outcome = execute(
                processor, row, arguments, limit=limit, still_ours=still_ours, attempt=attempt
            )
        outcome = leftover.judge(outcome)
        if isinstance(outcome, Failed):
            resource.reopen_later()
        if pk != last or refused or not settle_later(batch, pk, outcome):
            settle(batch, pk, outcome)


def _hand_over(
    batch: Batch[M], hand_over: Callable[[Batch[M], Any], None], rows: Iterable[tuple[Any, M]]
) -> None:
    """Hand out the rows, which keep their marks, instead of calling their handler."""
    for pk, _ in rows:
        hand_over(batch, pk)
        # Recorded afterwards: a row without an outcome is put back after an interrupt.
        batch.outcomes[pk] = HandedOut()


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
    batch: Batch[M],
    marked: MarkedRows,
    refused: list[tuple[Any, Outcome]],
    pks: Iterable[Any],
) -> Iterator[tuple[Any, M]]:
    """Yield each row when its handler may start; add the rows that may not to ``refused``."""
    context, retry, unstartable = batch.context, batch.processor.retry, dict[Any, Outcome]()
    common: Any = None if retry is None else retry.max_attempts
    if retry is not None and retry.limit_varies:
        common, unstartable = None, batch.read_limits()
    for pk in pks:
        if pk in marked.not_kept:
            continue
        # A handler may have lost the session. The next handler must not begin with a dead
        # connection, and rows that cannot start are put back.
        if not context.may_start(batch.outcomes) or not is_connected(batch.question.using):
            return
        most = batch.limits.get(pk, common)
        if pk in unstartable and not _ended_with_its_worker(batch, marked, unstartable[pk], pk):
            refused.append((pk, unstartable[pk]))
        elif most is not None and batch.attempts.get(pk, 1) > most:
            refused.append((pk, Failed(AttemptsUsedUp(most))))
        elif context.heartbeat is not None and not context.heartbeat.is_ours(pk):
            # Race: double claim. Another worker may handle a row whose lease has lapsed.
            refused.append((pk, Lost(called=False)))
        else:
            yield pk, batch.rows[pk]


def _ended_with_its_worker(
    batch: Batch[Any], marked: MarkedRows, outcome: Outcome, pk: Any
) -> bool:
    """Return whether a row has used up its attempts, and its last one left the lease behind."""
    lease = batch.processor.lease
    is_used_up = isinstance(outcome, UsedUp) and batch.processor._has_dead_letter
    return is_used_up and lease is not None and marked.before[pk][lease.field] is not None


def clear_up(batch: Batch[M]) -> None:
    """Settle rows that ended during an interrupt, and put back rows that were not started."""
    marked = batch.marked
    assert marked is not None
    if marked.ended:
        settle_ended(batch)
    for pk in [pk for pk in marked.after if pk not in batch.outcomes]:
        if marked.mark.is_lease or pk not in batch.started:
            put_back(batch, pk)
